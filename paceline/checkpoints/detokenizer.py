"""From token ids back to text, one token at a time and byte for byte what decoding the whole would give.

The decoder of a `tokenizers` tokenizer is read once into a `Spelling`, which says what each token contributes; the
`Detokenizer` then needs no look back over the output. Knows nothing of vocabularies or of encoding.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How the strings in a vocabulary spell text.

    `byte_level`: every character stands for a byte (GPT-2's alphabet); a token with any other character is plain text.
    Otherwise tokens are text after `replacements`, and where `byte_fallback`, a token `<0xNN>` is a byte: a run of
    them is text if it is valid UTF-8 and one U+FFFD for each byte if it is not.
    `first`: what happens at the very start of a text: a space is dropped ("space"), every replaced character of the
    first token is dropped ("token"), or nothing.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    first: Literal["", "space", "token"] = ""

    def spell(self, token: str) -> tuple[bytes, bool]:
        """What the token contributes to text, anywhere but at its start; whether it is a fallback byte."""
        if self.byte_level:
            try:
                return token.translate(_TO_BYTE).encode("latin-1"), False
            except UnicodeEncodeError:
                return token.encode(), False
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes((int(byte[1], 16),)), True
        return token.encode(), False

    def first_text(self, token: str) -> str:
        """What the token contributes as the very first of a text."""
        if self.first == "token":
            for old, _ in self.replacements:
                token = token.replace(old, "")
            return token
        text = self.spell(token)[0].decode()
        return text[1:] if self.first == "space" and text.startswith(" ") else text


def _to_byte() -> dict[int, int]:
    """Characters of GPT-2's alphabet to the Latin-1 characters of their bytes.

    Printable Latin-1 stands for itself and the other bytes follow from U+0100 on. Latin-1 characters outside the
    alphabet become one that Latin-1 cannot encode, so that encoding fails for them as it does for all other outsiders.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    outsiders = dict.fromkeys(others, 0xFFFF)
    return {byte: byte for byte in printable} | outsiders | {256 + i: byte for i, byte in enumerate(others)}


_TO_BYTE = _to_byte()
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")  # with the plus sign that the library's own parser takes


def read_spelling(decoder: Mapping[str, Any] | None) -> Spelling:
    """The spelling of a decoder as tokenizer.json describes it; ValueError for one that we could not stream exactly."""
    steps = _flatten(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    if kinds == ["Metaspace"]:
        (step,) = steps
        drops = step.get("prepend_scheme", "always") != "never"
        return Spelling(replacements=((step["replacement"], " "),), first="token" if drops else "")
    replacements = []
    while steps and steps[0].get("type") == "Replace" and "String" in steps[0].get("pattern", {}):
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    byte_fallback = _take(steps, "ByteFallback")
    fused = _take(steps, "Fuse")
    strips = fused and _take(steps, "Strip", content=" ", start=1, stop=0)
    if steps or not (replacements or byte_fallback or fused):
        raise ValueError(
            f"tokenizer decoder {kinds or None} cannot be streamed exactly; Paceline knows ByteLevel, Metaspace, and "
            "sequences of Replace, ByteFallback, Fuse and Strip as SentencePiece models have them"
        )
    return Spelling(replacements=tuple(replacements), byte_fallback=byte_fallback, first="space" if strips else "")


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _take(steps: list[Mapping[str, Any]], kind: str, **fields: Any) -> bool:
    """Remove the next step if it is of this kind, with these fields."""
    if steps and steps[0].get("type") == kind and all(steps[0].get(k) == v for k, v in fields.items()):
        del steps[0]
        return True
    return False


@dataclass(frozen=True)
class Vocabulary:
    """What every token spells: `tokens` by id, which ids are fallback bytes, and texts at the start of an output."""

    spelling: Spelling
    tokens: list[tuple[bool, bytes]]
    byte_ids: frozenset[int]
    first_text: Callable[[int], str]


class Detokenizer:
    """Text that became certain, token by token.

    All pieces and the `flush` at the end joined are what decoding the output gives. After a prompt they are what
    decoding prompt and output adds to decoding the prompt: a leading space stays, and a character that the prompt
    ends in the middle of comes whole with the output.

    A piece never holds half a character. What a run of SentencePiece's byte tokens spells is certain only once the
    run is over: one invalid byte turns the whole run into U+FFFD.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()
        self._begun = False
        self._read_prompt(prompt_ids)

    def push(self, id: int) -> str:
        """The text that this token made certain, often none."""
        data = self._contribution(id)
        if not data:
            return ""
        if self._vocabulary.spelling.byte_level:
            return self._utf8.decode(data)
        if id in self._vocabulary.byte_ids:
            self._run += data
            return ""
        run = self._end_run()
        text = data.decode() if self._begun else self._vocabulary.first_text(id)
        self._begun = True
        return run + text

    def flush(self) -> str:
        """What is left when no more tokens come: an unfinished character is U+FFFD."""
        if self._vocabulary.spelling.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._end_run()

    def _contribution(self, id: int) -> bytes:
        if not 0 <= id < len(self._vocabulary.tokens):
            return b""
        special, data = self._vocabulary.tokens[id]
        return b"" if special and self._skip_special_tokens else data

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        if not run:
            return ""
        try:
            text = run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(run)
        if not self._begun and self._vocabulary.spelling.first == "space":
            text = text.removeprefix(" ")
        self._begun = True
        return text

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Only the last four tokens with text can hold an unfinished character, so older ones are not read."""
        recent: list[int] = []
        for id in reversed(prompt_ids):
            if self._contribution(id):
                recent.append(id)
                if len(recent) == 4:
                    break
        for id in reversed(recent):
            self.push(id)
        if self._run:
            self._utf8.decode(self._run)
            self._run[:] = self._utf8.getstate()[0]
        self._begun = bool(recent)
