// Markdown as DOM nodes. Text only ever becomes text nodes, so nothing in an answer can become markup of its own;
// links go to http and https only.

const INLINE = /(`+)([\s\S]+?)\1|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(at, match.index));
    at = match.index + match[0].length;
    const [, , code, strong, emphasis, label, target] = match;
    if (code !== undefined) nodes.push(element("code", code));
    else if (strong !== undefined) nodes.push(element("strong", ...inline(strong)));
    else if (emphasis !== undefined) nodes.push(element("em", ...inline(emphasis)));
    else {
      const link = element("a", label);
      link.href = target;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      nodes.push(link);
    }
  }
  nodes.push(text.slice(at));
  return nodes;
}

function fence(lines, start) {
  const mark = lines[start].match(/^ {0,3}(`{3,}|~{3,})/)[1];
  let end = start + 1;
  while (end < lines.length && !lines[end].trimStart().startsWith(mark)) end += 1;
  return [element("pre", element("code", lines.slice(start + 1, end).join("\n"))), end + 1];
}

function list(lines, start) {
  const ordered = /^\s*\d+[.)]\s/.test(lines[start]);
  const item = ordered ? /^\s*\d+[.)]\s+(.*)/ : /^\s*[-*+]\s+(.*)/;
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = parseInt(lines[start].trim(), 10);
  let at = start;
  for (let match; at < lines.length && (match = lines[at].match(item)); at += 1) node.append(element("li", ...inline(match[1])));
  return [node, at];
}

const BLOCK = /^ {0,3}(`{3,}|~{3,}|#{1,6}\s|>|[-*+]\s|\d+[.)]\s)/;

function block(lines, start) {
  const line = lines[start];
  if (/^ {0,3}(`{3,}|~{3,})/.test(line)) return fence(lines, start);
  const heading = line.match(/^ {0,3}(#{1,6})\s+(.*)/);
  if (heading) return [element(`h${Math.min(heading[1].length + 1, 6)}`, ...inline(heading[2])), start + 1];
  if (/^\s*([-*+]|\d+[.)])\s/.test(line)) return list(lines, start);
  let end = start + 1;
  if (line.startsWith(">")) {
    while (end < lines.length && lines[end].startsWith(">")) end += 1;
    return [element("blockquote", ...markdown(lines.slice(start, end).map((l) => l.replace(/^> ?/, "")).join("\n"))), end];
  }
  while (end < lines.length && lines[end].trim() && !BLOCK.test(lines[end])) end += 1;
  return [element("p", ...inline(lines.slice(start, end).join("\n"))), end];
}

export function markdown(text) {
  const lines = text.split("\n");
  const nodes = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [node, next] = block(lines, at);
    nodes.push(node);
    at = next;
  }
  return nodes;
}
