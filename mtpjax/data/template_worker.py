"""Renders chat templates in a separate process, with limits on time, memory and output.

Templates come with checkpoints, which are untrusted. jinja2's sandbox keeps a template away from Python objects, but a
single expression such as `'a' * 10**9` or `9**(9**9)` can still use all memory or never end. A thread cannot be
stopped, but a separate process can be, from any thread and on every Unix. The process runs this file as a script,
without JAX or the mtpjax package, so only `TemplateWorker` imports from the package, and not at the top of the file.
"""

import atexit
import contextlib
import datetime
import json
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_SECONDS = 10  # time limit for one conversation; published templates need milliseconds
ANSWER_SECONDS = 2  # additional time for a worker to start, and for its answer to arrive
MAX_MEMORY = 512 << 20  # bytes of the worker's address space (not enforced on macOS; the time limit bounds it there)
MAX_OUTPUT_CHARACTERS = 16 << 20
_COMPILED_TEMPLATES = 8


class TemplateFailure(Exception):
    """A template failed. The message is the reason; `is_template` is true if it fails for every conversation."""

    def __init__(self, message: str, *, is_template: bool = False):
        super().__init__(message)
        self.is_template = is_template


class Rendered(NamedTuple):
    """A rendered template.

    Attributes:
        text: the text.
        generation: start and end in `text` of each `{% generation %}` block, ascending. None if the template has no
            such block, blocks were not requested, or the template changes the text of a block afterwards.
    """

    text: str
    generation: list[tuple[int, int]] | None = None


class TemplateWorker:
    """A process that renders templates one at a time. It starts at the first call, and again after it hits a limit."""

    def __init__(self):
        # The worker itself must not import this, because it runs this file as a script.
        from mtpjax.worker_process import WorkerProcess

        self._worker = WorkerProcess(__file__)
        self._compiled: dict[str, Any] | None = None  # compiled templates, if this process renders them itself

    def render_here(self) -> None:
        """Renders in this process from now on. Call it only in a process that has limits on time and memory."""
        self._compiled = {}

    def render_all(
        self,
        template: str,
        variable_sets: Sequence[dict[str, Any]],
        *,
        date: datetime.datetime | None = None,
        with_generation: bool = False,
    ) -> list[Rendered | TemplateFailure]:
        """Renders a template several times in one request, within one time limit.

        Args:
            variable_sets: the variables for each rendering, which must be JSON values.
            date: the date for `strftime_now`; by default the current date.
        """
        from mtpjax.worker_process import WorkerEnded

        request = {"template": template, "renders": list(variable_sets), "date": date and date.isoformat()}
        line = json.dumps({**request, "with_generation": with_generation}).encode()
        if self._compiled is not None:
            return [_to_result(each) for each in _answer_all(json.loads(line), self._compiled)]
        seconds = MAX_SECONDS + ANSWER_SECONDS
        try:
            try:
                answer = self._worker.ask([line], seconds)
            except WorkerEnded as ended:
                # The process ends itself after MAX_SECONDS. If it did not, it was suspended, so use a new one.
                if ended.code is not None:
                    raise
                answer = self._worker.ask([line], seconds)
        except WorkerEnded as ended:
            if ended.code == -signal.SIGALRM:
                raise TemplateFailure(f"the template ran for more than {MAX_SECONDS} seconds") from ended
            if ended.code is None:
                raise TemplateFailure(f"the process did not answer within {seconds} seconds") from ended
            message = f"the process ended with code {ended.code}, probably because it needs over {MAX_MEMORY >> 20} MiB"
            raise TemplateFailure(message) from ended
        return [_to_result(each) for each in json.loads(answer)]

    def close(self) -> None:
        """Ends the process. A later rendering starts a new one."""
        self._worker.close()

    def kill(self) -> None:
        """Kills the process at once. A rendering in progress fails."""
        self._worker.kill()


def _to_result(answer: dict[str, Any]) -> Rendered | TemplateFailure:
    if "text" not in answer:
        return TemplateFailure(answer["error"], is_template=answer["is_template"])
    spans = answer["generation"]
    return Rendered(answer["text"], spans and [(start, end) for start, end in spans])


if __name__ != "__main__":
    WORKER = TemplateWorker()
    atexit.register(WORKER.close)


def serve() -> None:
    """Serves requests, one JSON object per line, from standard input until it ends."""
    # Ctrl-C reaches every process in the terminal; the caller decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Import before setting the limits, so that a low limit cannot make the import fail.
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401

    with contextlib.suppress(ValueError, OSError):  # the platform lacks this limit, or a lower one applies
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    compiled: dict[str, Any] = {}
    for line in sys.stdin.buffer:
        # Without a handler, the alarm ends the process, even during one long computation in the interpreter.
        signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
        answer = json.dumps(_answer_all(json.loads(line), compiled)).encode() + b"\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _answer_all(request: dict[str, Any], compiled: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a dict with "text" and "generation", or "error" and "is_template", for each rendering in a request."""
    template, date = request["template"], request["date"]
    try:
        if template not in compiled:
            if len(compiled) >= _COMPILED_TEMPLATES:
                compiled.clear()
            compiled[template] = _environment().from_string(template)
    except Exception as error:
        return [_failure(error, is_template=True)] * len(request["renders"])
    moment = datetime.datetime.fromisoformat(date) if date else None
    strftime_now = lambda form: (moment or datetime.datetime.now()).strftime(form)
    answers = []
    for variables in request["renders"]:
        # From here on, the messages may cause an error. A template can raise any exception.
        try:
            variables = {"strftime_now": strftime_now, **variables}
            answers.append(_answer(compiled[template], variables, with_generation=request["with_generation"]))
        except Exception as error:
            answers.append(_failure(error, is_template=False))
    return answers


def _answer(template: Any, variables: dict[str, Any], *, with_generation: bool) -> dict[str, Any]:
    """Renders once, and if there are generation blocks, a second time with a mark around each."""
    environment = template.environment
    environment.generation_mark = ""
    text = _render(template, variables)
    text.encode()  # lone surrogates have no tokens
    if not (with_generation and environment.has_generation):
        return {"text": text, "generation": None}
    # A template may move, trim or drop the text of a block, so the marks are used only if the text stays the same.
    mark = next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in text)
    environment.generation_mark = mark
    pieces = _render(template, variables).split(mark)
    if "".join(pieces) != text or len(pieces) % 2 == 0:
        return {"text": text, "generation": None}
    # The pieces at odd indices are the blocks.
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    return {"text": text, "generation": [(ends[n], ends[n + 1]) for n in range(1, len(pieces), 2) if pieces[n]]}


def _render(template: Any, variables: dict[str, Any]) -> str:
    parts, size = [], 0
    for part in template.generate(variables):
        parts.append(part)
        size += len(part)
        if size > MAX_OUTPUT_CHARACTERS:
            raise ValueError(f"the rendered text has more than {MAX_OUTPUT_CHARACTERS} characters")
    return "".join(parts)


def _failure(error: Exception, *, is_template: bool) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {str(error)[:200]}", "is_template": is_template}


def _environment():
    """Makes the sandbox, with the settings, tags, filters and functions that transformers gives to chat templates."""
    import jinja2
    import jinja2.nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` ... `{% endgeneration %}` around what the model writes, which is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012, jinja2's interface

        def parse(self, parser):
            line = next(parser.stream).lineno
            vars(self.environment)["has_generation"] = True
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller):
            mark = vars(self.environment)["generation_mark"]
            return mark + caller() + mark

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.extend(generation_mark="", has_generation=False)
    environment.add_extension(Generation)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


if __name__ == "__main__":
    serve()
