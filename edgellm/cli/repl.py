"""The loop behind `edgellm chat`: read a message, let the model answer, keep the conversation.

Ctrl-C while the model answers stops it; the part that came stays in the conversation (if nothing came, the question is
taken back too). Ctrl-C at the prompt drops what was typed; Ctrl-D leaves.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import click

from edgellm.cli.prompt import Reader, unquote
from edgellm.cli.render import make_printer
from edgellm.cli.session import Answer, Message, Session, dropped_line, stats_line
from edgellm.errors import ContextLengthError, EdgeLLMError

__all__ = ["Conversation", "Repl"]


@dataclass
class Conversation:
    """What is sent with each turn."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    render: bool = True
    """Markdown is drawn (on a terminal only)."""
    stats: bool = False
    """A line with the speed follows each answer."""

    def messages(self) -> list[Message]:
        """System message, then the turns."""
        head = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*head, *self.turns]


class Repl:
    """Runs until Ctrl-D or /bye."""

    def __init__(self, session: Session, reader: Reader, conversation: Conversation, truncate: bool = False):
        self.session = session
        self.conversation = conversation
        self._reader = reader
        self._truncate = truncate

    def loop(self) -> None:
        """Read and answer until the end."""
        from edgellm.cli.repl_commands import is_command, run_command

        while True:
            try:
                text = self._reader.read()
                if not text.strip():
                    continue
                if not is_command(text):
                    self.answer(unquote(text))
                elif not run_command(self, text):
                    return
            except EOFError:
                return
            except KeyboardInterrupt:
                click.echo("Ctrl-D or /bye leaves.", err=True)

    def answer(self, text: str) -> None:
        """One turn. A turn that fails is taken out of the conversation again, and the reason is shown."""
        turns = self.conversation.turns
        turns.append({"role": "user", "content": text})
        kept = False
        try:
            answer = self._stream_or_ask()
            kept = answer is not None and (answer.text != "" or answer.finish_reason != "abort")
            if answer is not None and kept:
                turns.append({"role": "assistant", "content": answer.text})
                self._tell(answer)
        except EdgeLLMError as error:
            click.echo(f"edgellm: {error}", err=True)
        finally:
            if not kept:
                turns.pop()

    def _stream_or_ask(self) -> Answer | None:
        try:
            return self._stream(self._truncate)
        except ContextLengthError as error:
            click.echo(f"edgellm: {error}", err=True)
            return self._stream(truncate=True) if _agrees("Drop the oldest turns so that it fits?") else None

    def _stream(self, truncate: bool) -> Answer:
        reply = self.session.reply(self.conversation.messages(), self.conversation.sampling, truncate)
        printer = make_printer(self.conversation.render)
        try:
            for piece in reply:
                printer.write(piece)
        except KeyboardInterrupt:
            reply.cancel()
        except BaseException:
            reply.cancel()
            raise
        finally:
            printer.close()
        return reply.answer

    def _tell(self, answer: Answer) -> None:
        if answer.truncated:
            click.echo(dropped_line(answer.truncated), err=True)
        if answer.finish_reason == "length":
            click.echo("edgellm: the answer stopped at its length limit", err=True)
        if self.conversation.stats and answer.ttft_s is not None:
            click.echo(stats_line(answer), err=True)
        sys.stderr.flush()


def _agrees(question: str) -> bool:
    """Ctrl-C and Ctrl-D mean no: they take the message back and do not end the conversation."""
    try:
        return click.confirm(question, default=True, err=True)
    except click.Abort:
        click.echo("", err=True)
        return False
