"""Run a command in a terminal of its own and draw what it printed: `python docs/transcript.py OUT.svg COMMAND...`"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH = 100


def run(command: list[str]) -> str:
    """What the command printed, colours included; exits where the command failed."""
    seen = bytearray()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 65536)
        seen.extend(data)
        return data

    os.environ |= {"COLUMNS": str(WIDTH), "LINES": "200", "TERM": "xterm-256color"}
    if status := os.waitstatus_to_exitcode(pty.spawn(command, read)):
        sys.exit(f"{command[0]} ended with {status}")
    return seen.decode().replace("\r\n", "\n")


def shown(output: str) -> str:
    """What is left on the screen: a line that was rewritten is its last version, cursor movements are dropped."""
    output = re.sub(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]", "", output)
    return "\n".join(line.rsplit("\r", 1)[-1] for line in output.split("\n")).rstrip("\n")


def main() -> None:
    target, command = Path(sys.argv[1]), sys.argv[2:]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    words = [Path(command[0]).name, *command[1:]]
    console.print(Text("$ " + " ".join(f'"{word}"' if " " in word else word for word in words), style="bold"))
    console.print(Text.from_ansi(shown(run(command))))
    # No web font: the picture names nothing outside itself.
    style = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
    target.write_text(console.export_svg(title="paceline", code_format=style))


if __name__ == "__main__":
    main()
