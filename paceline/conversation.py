"""The interactive conversation of `paceline chat`: what was said, what still fits the context, what a line means.

Reads lines from stdin and shows through a `Screen`; knows nothing of flags. Every answer reads the conversation anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from paceline.decoding.stats import Stats
from paceline.engine.llm import LLM
from paceline.sampling.params import SamplingParams
from paceline.terminal import Screen, complain, note, stats_line

Message = dict[str, str]

HELP = "/clear forgets the conversation, /stats shows the totals, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


class Conversation:
    """`opening` are the messages that are never forgotten (the system message)."""

    def __init__(self, llm: LLM, params: SamplingParams, screen: Screen, opening: Sequence[Message]) -> None:
        self.llm, self.params, self.screen = llm, params, screen
        self.opening = list(opening)
        self.turns: list[Message] = []
        """A message of the user, then an answer, and so on."""
        self.stats = Stats()

    def run(self) -> None:
        # A model without a template is refused before anything is typed.
        self.llm.tokenizer.encode_chat([*self.opening, {"role": "user", "content": "Hello"}])
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if interactive:
            note(HELP)
            with suppress(ImportError):  # Windows has none
                import readline  # noqa: F401 (gives input() line editing and a history)
        while True:
            try:
                line = input("> " if interactive else "").strip()
                if line == "/exit":
                    return
                if line:
                    self._handle(line)
            except EOFError:
                if interactive:
                    self.screen.new_line()
                return
            except KeyboardInterrupt:
                self.screen.new_line()
                note("/exit or Ctrl-D leaves")
            except ValueError as error:
                complain(error)

    def _handle(self, line: str) -> None:
        if line == "/clear":
            self.turns.clear()
            note("forgotten")
        elif line == "/stats":
            note(stats_line(self.stats))
        elif line == "/help":
            note(HELP)
        elif line.startswith("/") and line[1:].isalpha():
            note(f"there is no {line}: {HELP}")
        else:
            self._answer(line)

    def _answer(self, message: str) -> None:
        turns = self._with_room([*self.turns, {"role": "user", "content": message}])
        said = ""
        try:
            for chunk in self.llm.stream([*self.opening, *turns], self.params):
                said += chunk.text
                self.screen.write((token.provenance.value, token.text) for token in chunk.tokens)
                if chunk.completion:
                    self.stats += chunk.completion.stats
                    self.screen.end_line()
                    note(stats_line(chunk.completion.stats))
        except KeyboardInterrupt:
            self.screen.new_line()
            note("stopped")
        finally:
            # However the answer ended, what was said of it belongs to the conversation; a question without is dropped.
            if said:
                self.turns = [*turns, {"role": "assistant", "content": said}]
            self.screen.end_line()

    def _with_room(self, turns: list[Message]) -> list[Message]:
        """`turns` without the oldest ones, as far as an answer needs room in the context; the last message stays."""
        context = self.llm.target.context
        most = context - min(self.params.max_tokens or context, context // 4)
        kept = turns
        while len(kept) > 1 and len(self.llm.tokenizer.encode_chat([*self.opening, *kept])) > most:
            kept = kept[2:]
        if forgotten := (len(turns) - len(kept)) // 2:
            note(f"the context of {context} tokens is full: forgot the oldest {forgotten} of {len(turns) // 2} turns")
        return kept
