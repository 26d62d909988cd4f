"""Encodes a call as bytes, with the name and key of its program and its arrays on the host.

The other processes have the same decoder, so it is not sent. Drafts are not sent either, because every process has the
draft that its own `draft_round` made.
"""

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding import session as programs
from mtpjax.decoding.gpu_graph import OneGraph
from mtpjax.decoding.sampling import SamplingArrays, SamplingFeatures
from mtpjax.decoding.session import Batch, PromptChunk
from mtpjax.decoding.state import Draft, NewRows, RowSettings
from mtpjax.serving import scoring
from mtpjax.serving.disaggregation import protocol
from mtpjax.serving.program_set import PendingCall, ProgramKey

FIELDS = {"name": str, "arguments": list, "key": list}
TYPES = {each.__name__: each for each in (Batch, PromptChunk, NewRows, RowSettings, SamplingArrays, SamplingFeatures)}
MIN_REPEATED = 64  # minimum size at which an array of equal elements is sent as one element


def encode(name: str, *arguments: Any, key: ProgramKey | None = None) -> bytes:
    """Encodes a call.

    Args:
        name: the name of a program, or one of `follower.METHODS`.
        *arguments: numbers, strings, arrays on the host, and tuples and dataclasses of them.
        key: selects the program's static arguments; None for a method.
    """
    return protocol.pack({"name": name, "arguments": [_to_plain(each) for each in arguments], "key": list(key or ())})


def decode(body: bytes) -> tuple[str, tuple[Any, ...], list[Any]]:
    """Decodes a call into name, arguments and key. Raises ValueError if it is damaged or from another version."""
    message = protocol.unpack(body, FIELDS)
    return message["name"], tuple(_from_plain(each) for each in message["arguments"]), message["key"]


def decode_call(name: str, arrays: tuple[Any, ...], key: list[Any]) -> PendingCall:
    """Makes the call of a program from the values that `decode` returned.

    Raises:
        ValueError: the program does not exist.
    """
    program = getattr(programs, name, None) or getattr(scoring, name, None)
    if not isinstance(program, OneGraph) or len(key) != len(ProgramKey._fields):
        _reject(name)
    return PendingCall(program, arrays, ProgramKey(*key))


def _to_plain(value: Any) -> Any:
    """Converts a value to types that msgpack can encode."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, tuple | list):
        return [_to_plain(each) for each in value]
    if isinstance(value, Draft):
        return {"type": "Draft"}
    if type(value) in TYPES.values():
        fields = {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, "fields": fields}
    assert not isinstance(value, jax.Array), "arrays on the device are not sent"
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
    raise ValueError(f"a call has an unknown element, {name!r}; do all processes run the same version?")
