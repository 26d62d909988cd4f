"""Renders chat templates in a separate process, under limits of time, memory and output.

Templates come with checkpoints, which are untrusted. jinja2's sandbox keeps a template away from Python objects, but a
single expression such as `'a' * 10**9` or `9**(9**9)` can still use all memory or never end, and no thread can stop it.
A separate process can be stopped, from any thread and on every Unix. It runs this file as a script, without JAX and
without the package, so only what `TemplateWorker` needs is imported from there, and not at the top.
"""

import atexit
import contextlib
import datetime
import json
import resource
import signal
import sys
from typing import Any

MAX_SECONDS = 10  # for one conversation; the published templates need milliseconds
ANSWER_SECONDS = 2  # more for the answer to arrive, and for a worker that starts
MAX_MEMORY = 512 << 20  # bytes of address space of the worker (macOS does not enforce this; time bounds it there)
MAX_OUTPUT_CHARACTERS = 16 << 20
_COMPILED_TEMPLATES = 8


class TemplateFailure(Exception):
    """A template failed. The message says how; `is_template` is true if it fails with any conversation."""

    def __init__(self, message: str, *, is_template: bool = False):
        super().__init__(message)
        self.is_template = is_template


class TemplateWorker:
    """A process that renders templates one after the other. It starts at the first call, and again after a limit."""

    def __init__(self):
        # Not for the worker itself, which runs this file as a script.
        from mtpjax.worker_process import WorkerProcess

        self._worker = WorkerProcess(__file__)

    def render(self, template: str, variables: dict[str, Any], *, date: datetime.datetime | None = None) -> str:
        """Renders a template.

        Args:
            template: jinja2 source.
            variables: the template's variables, which must have a JSON form.
            date: the date for `strftime_now`; None: now.

        Returns:
            The text.

        Raises:
            TemplateFailure: the template does not compile, fails, or exceeds a limit.
            TypeError: a variable has no JSON form.
            ValueError: a variable refers to itself.
        """
        from mtpjax.worker_process import WorkerEnded

        request = {"template": template, "variables": variables, "date": date and date.isoformat()}
        line, seconds = json.dumps(request).encode(), MAX_SECONDS + ANSWER_SECONDS
        try:
            try:
                answer = self._worker.ask(line, seconds)
            except WorkerEnded as ended:
                # The process ends itself after MAX_SECONDS. One that does not was stopped: ask a new one.
                if ended.code is not None:
                    raise
                answer = self._worker.ask(line, seconds)
        except WorkerEnded as ended:
            if ended.code == -signal.SIGALRM:
                raise TemplateFailure(f"it ran for more than {MAX_SECONDS} seconds") from ended
            if ended.code is None:
                raise TemplateFailure(f"its process did not answer within {seconds} seconds") from ended
            message = f"its process ended with code {ended.code}, probably out of {MAX_MEMORY >> 20} MiB"
            raise TemplateFailure(message) from ended
        result = json.loads(answer)
        if "text" in result:
            return result["text"]
        raise TemplateFailure(result["error"], is_template=result["is_template"])

    def close(self) -> None:
        """Ends the process. A later `render` starts a new one."""
        self._worker.close()

    def kill(self) -> None:
        """Ends the process at once, also in the middle of a template, whose call then fails."""
        self._worker.kill()


if __name__ != "__main__":
    WORKER = TemplateWorker()
    atexit.register(WORKER.close)


def serve() -> None:
    """Answers requests, one JSON object a line, from standard input until it ends."""
    # Ctrl-C reaches every process of the terminal; the caller decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Import before the limits, so that a low limit cannot fail here.
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401

    with contextlib.suppress(ValueError, OSError):  # a platform without this limit, or a lower one is in force
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    compiled: dict[str, Any] = {}
    for line in sys.stdin.buffer:
        # Without a handler the alarm ends the process, even inside one long computation of the interpreter.
        signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
        answer = json.dumps(_answer(json.loads(line), compiled)).encode() + b"\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _answer(request: dict[str, Any], compiled: dict[str, Any]) -> dict[str, Any]:
    """Renders one request: a dict with "text", or with "error" and "is_template"."""
    template, date = request["template"], request["date"]
    is_template = True
    try:
        if template not in compiled:
            if len(compiled) >= _COMPILED_TEMPLATES:
                compiled.clear()
            compiled[template] = _environment().from_string(template)
        # From here on the messages may be at fault. Any exception can come out of a template.
        is_template = False
        moment = datetime.datetime.fromisoformat(date) if date else None
        strftime_now = lambda form: (moment or datetime.datetime.now()).strftime(form)
        parts, size = [], 0
        for part in compiled[template].generate({"strftime_now": strftime_now, **request["variables"]}):
            parts.append(part)
            size += len(part)
            if size > MAX_OUTPUT_CHARACTERS:
                raise ValueError(f"its text has more than {MAX_OUTPUT_CHARACTERS} characters")
        text = "".join(parts)
        text.encode()  # lone surrogates have no tokens
        return {"text": text}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}", "is_template": is_template}


def _environment():
    """Makes the sandbox, with the settings, filters and functions that transformers gives to chat templates."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    return environment


if __name__ == "__main__":
    serve()
