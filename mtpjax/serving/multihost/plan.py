"""A call as bytes: the name of its program, its static settings, and its arrays on the host.

The other processes have the same model, drafter and spec, so those do not travel. Drafts do not either: every process
has the draft that its own `draft_round` made.
"""

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding import session as programs
from mtpjax.decoding.drafter import Draft
from mtpjax.decoding.gpu_graph import OneGraph
from mtpjax.decoding.sampling import SamplingArrays, SamplingFeatures
from mtpjax.decoding.session import Batch, Features
from mtpjax.decoding.state import NewRows, RowSettings
from mtpjax.serving import scoring
from mtpjax.serving.calls import Work
from mtpjax.serving.disaggregation import protocol

FIELDS = {"name": str, "arguments": list, "settings": dict}
OF_EXECUTOR = ("drafter", "spec")  # static settings that every process has
TYPES = {each.__name__: each for each in (Batch, Features, NewRows, RowSettings, SamplingArrays, SamplingFeatures)}
MIN_REPEATED = 64  # elements from which an array of equal elements travels as one of them


def encode(name: str, *arguments: Any, settings: dict[str, Any] | None = None) -> bytes:
    """Encodes a call.

    Args:
        name: of a program, or of a method of `Executor`.
        *arguments: numbers, strings, arrays on the host, and tuples and dataclasses of them.
        settings: static settings of a program.
    """
    message = {"name": name, "arguments": [_to_plain(each) for each in arguments], "settings": {}}
    message["settings"] = {key: _to_plain(value) for key, value in (settings or {}).items()}
    return protocol.pack(message)


def encode_work(work: Work) -> bytes:
    """Encodes a call of a program."""
    settings = {key: None if key in OF_EXECUTOR else value for key, value in work.settings.items()}
    name = work.program.plain.__name__
    return encode(name, *work.arrays, settings=settings)


def decode(body: bytes) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Decodes a call into name, arguments and settings.

    Raises:
        ValueError: the message is damaged, or of another version.
    """
    message = protocol.unpack(body, FIELDS)
    arguments = tuple(_from_plain(each) for each in message["arguments"])
    return message["name"], arguments, {name: _from_plain(value) for name, value in message["settings"].items()}


def decode_work(name: str, arrays: tuple[Any, ...], settings: dict[str, Any], own: dict[str, Any]) -> Work:
    """Makes the call that `encode_work` has encoded.

    Args:
        name: of the program.
        arrays: its arguments behind the state.
        settings: its static settings.
        own: values of the settings `OF_EXECUTOR`.

    Raises:
        ValueError: the program does not exist.
    """
    program = getattr(programs, name, None) or getattr(scoring, name, None)
    if not isinstance(program, OneGraph):
        _reject(name)
    return Work(program, arrays, {key: own.get(key, value) for key, value in settings.items()})


def _to_plain(value: Any) -> Any:
    """Returns what msgpack can hold."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, tuple | list):
        return [_to_plain(each) for each in value]
    if isinstance(value, Draft):
        return {"type": "Draft"}
    if type(value) in TYPES.values():
        fields = {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, "fields": fields}
    assert not isinstance(value, jax.Array), "arrays on the device do not travel"
    array = np.asarray(value)
    # The options of most requests are zeros, one for each token of the vocabulary.
    is_repeated = array.size >= MIN_REPEATED and bool((array == array.flat[0]).all())
    data = (array.reshape(-1)[:1] if is_repeated else array).tobytes()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_plain(each) for each in value)
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        shape, array = tuple(value["shape"]), np.frombuffer(value["data"], jnp.dtype(value["dtype"]))
        return np.full(shape, array[0]) if array.size == 1 else array.reshape(shape)
    if value["type"] == "Draft":
        return Draft
    if value["type"] not in TYPES:
        _reject(value["type"])
    return TYPES[value["type"]](**{name: _from_plain(field) for name, field in value["fields"].items()})


def _reject(name: str) -> NoReturn:
    raise ValueError(f"a call has an unknown part, {name!r}; do all processes run the same version?")
