// The chat page: one conversation, streamed from /api/chat of the server that served it.

import { markdown } from "/ui/markdown.js";

const $ = (id) => document.getElementById(id);
const log = $("log"), prompt = $("prompt"), picker = $("model"), status = $("status");
let messages = [];
let running = null;

async function call(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const reply = await fetch(path, { ...options, headers });
  if (reply.status === 401) {
    const given = window.prompt("This server needs an API key:");
    if (given === null) throw new Error("no API key");
    sessionStorage.setItem("key", given);
    return call(path, options);
  }
  if (!reply.ok) throw new Error((await reply.json().catch(() => ({}))).error || `HTTP ${reply.status}`);
  return reply;
}

async function listModels() {
  try {
    const { models } = await (await call("/api/tags")).json();
    picker.replaceChildren(...models.map((model) => new Option(model.name, model.name)));
    const last = localStorage.getItem("model");
    if (models.some((model) => model.name === last)) picker.value = last;
    status.textContent = models.length ? "" : "No models yet. In a terminal: edgellm pull demo";
  } catch (error) {
    status.textContent = `The models can't be listed: ${error.message}`;
  }
}

function show(kind, ...children) {
  const node = document.createElement("article");
  node.className = kind;
  node.append(...children);
  log.append(node);
  log.scrollTop = log.scrollHeight;
  return node;
}

async function* objects(reply) {
  const decoder = new TextDecoder();
  let rest = "";
  const reader = reply.body.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    rest += decoder.decode(value ?? new Uint8Array(), { stream: !done });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
    if (done) return;
  }
}

function figures(final) {
  const parts = [];
  if (final.eval_count && final.eval_duration) parts.push(`${(final.eval_count / final.eval_duration * 1e9).toFixed(1)} tokens/s`);
  parts.push(`${final.eval_count ?? 0} new`, `${final.prompt_eval_count ?? 0} prompt`, `${final.cached_tokens ?? 0} cached`);
  if (final.done_reason === "length") parts.push("cut at the limit");
  if (final.truncated) parts.push(`${final.truncated.messages} oldest messages were dropped to fit`);
  return parts.join(" · ");
}

function paint(node, answer) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const parts = markdown(answer.content);
  if (answer.thinking) {
    const details = document.createElement("details");
    details.open = !answer.content;
    details.append(Object.assign(document.createElement("summary"), { textContent: "Thought" }), answer.thinking);
    parts.unshift(details);
  }
  if (answer.figures) parts.push(Object.assign(document.createElement("p"), { className: "figures", textContent: answer.figures }));
  node.replaceChildren(...parts);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function receive(node, answer) {
  const body = JSON.stringify({ model: picker.value, messages });
  let frame = 0;
  for await (const item of objects(await call("/api/chat", { method: "POST", body, signal: running.signal }))) {
    if (item.error) throw new Error(item.error);
    answer.content += item.message.content;
    answer.thinking += item.message.thinking ?? "";
    if (item.done) answer.figures = figures(item);
    frame ||= requestAnimationFrame(() => { frame = 0; paint(node, answer); });
  }
}

async function send(text) {
  messages.push({ role: "user", content: text });
  show("user", text);
  const answer = { content: "", thinking: "", figures: "" };
  const node = show("assistant", "…");
  running = new AbortController();
  busy(true);
  try {
    await receive(node, answer);
  } catch (error) {
    if (error.name === "AbortError") answer.figures = "stopped";
    else show("error", error.message);
  }
  running = null;
  busy(false);
  paint(node, answer);
  if (answer.content) messages.push({ role: "assistant", content: answer.content });
  else messages.pop();
  prompt.focus();
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  status.textContent = on ? "Answering… Esc stops." : "";
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running || !picker.value) return;
  prompt.value = "";
  send(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => { running?.abort(); messages = []; log.replaceChildren(); prompt.focus(); });
picker.addEventListener("change", () => localStorage.setItem("model", picker.value));
listModels();
