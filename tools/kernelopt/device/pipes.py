"""What a child writes, read as it comes: the messages of its job, and the end of its log."""

import contextlib
import os
import queue
import threading
import time

from .. import bundle

LOG_TAIL_BYTES = 8000
REPORT_BYTES = 64 << 20


class Report:
    """The messages of a job. A line holds its seal and a JSON object: a mark, an answer or the result. Any other line
    is a forgery."""

    def __init__(self, seal: str):
        self._seal, self._rest, self._size = f"{seal} ".encode(), b"", 0
        self.result: dict | None = None
        self.marks: dict[str, tuple[float, int]] = {}
        self.answers: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self.forged = False

    def take(self, piece: bytes) -> None:
        now = time.monotonic()
        self._size += len(piece)
        if self._size > REPORT_BYTES:
            self.forged = True
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line, now)

    def unfinished(self) -> bool:
        """Is there an unfinished line that does not begin with the seal?"""
        return bool(self._rest) and not self._rest.startswith(self._seal[: len(self._rest)])

    def _line(self, line: bytes, now: float) -> None:
        try:
            message = bundle.loads(line.removeprefix(self._seal).decode())
            sound = line.startswith(self._seal) and sum(kind in message for kind in ("mark", "answer", "result")) == 1
        except (ValueError, TypeError):
            sound = False
        if not sound or self.result is not None:
            self.forged = True
        elif "mark" in message:
            self.marks.setdefault(message["mark"], (now, message["calls"]))
        elif "answer" in message:
            self.answers.put(message["answer"])
        else:
            self.result = message["result"]


class Tail:
    """The end of a child's output. It is read as it comes, so a kernel that prints without end fills no memory."""

    def __init__(self):
        self._tail = b""

    def take(self, piece: bytes) -> None:
        self._tail = (self._tail + piece)[-LOG_TAIL_BYTES:]

    def text(self) -> str:
        return self._tail.decode("utf-8", "replace")


class Pump:
    """A thread that reads a pipe to its end and hands each piece to a reader."""

    GRACE_S = 2.0  # a process that escaped may hold the pipe open

    def __init__(self, stream, reader):
        self.reader, self._stream = reader, stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while piece := os.read(self._stream.fileno(), 1 << 16):
                self.reader.take(piece)

    def finish(self) -> None:
        self._thread.join(self.GRACE_S)

    @staticmethod
    def feeding(stream, content: bytes) -> threading.Thread:
        """A thread that writes `content` to a process, which may ignore it or die meanwhile."""

        def feed() -> None:
            with contextlib.suppress(OSError), stream:
                stream.write(content)

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        return thread


def pumped(reader) -> tuple[Pump, int]:
    """A pipe that feeds `reader`, and the handle to write to it."""
    read, write = os.pipe()
    return Pump(os.fdopen(read, "rb", buffering=0), reader), write


def last_line(log: str | bytes) -> str:
    """The last line of a program's log that is not empty, or words for none."""
    text = log if isinstance(log, str) else log.decode("utf-8", "replace")
    return next(filter(None, map(str.strip, reversed(text.splitlines()))), "it left no message")
