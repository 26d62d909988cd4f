"""Decodes one token at a time: the texts of all steps join to exactly the text of all tokens.

A decoder of the tokenizers package is a chain of stages from a list of pieces to a list of pieces, whose join is the
text. Each stage here takes one piece at a time and returns the pieces that later ones cannot change:

    ByteLevel (GPT-2)            bytes of all tokens are one UTF-8 text: half characters wait for their other bytes
    ByteFallback (SentencePiece) bytes of neighbours like <0xE5> are one character or more, or each is U+FFFD: a run of
                                 such tokens waits for its end
    Metaspace, WordPiece         the first token differs from the others; a tokenizer without a decoder joins by spaces
    BPEDecoder                   the last token differs: one token waits
    CTC                          a token that equals the one before is dropped
    Fuse, ByteLevel              make one piece of all: later stages then see parts of one piece
    Strip after them             drops characters at the start, and holds back those that it may drop at the end

A stage that is not in this list holds back all text to the end, and then runs once over everything.
"""

import copy
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from mtpjax.byte_letters import BYTE_OF_LETTER
from mtpjax.data.incremental_decoder import (
    ByteFallbackStage,
    ChangedTokenStage,
    FirstTokenStage,
    LastTokenStage,
    MapStage,
    Piece,
    ReplaceStage,
    Stage,
    StripStage,
    Utf8Stage,
    WholeTextStage,
)
from mtpjax.data.tokenizer_files import rust_errors

CONTEXT_TOKENS = 16  # of a prompt; a token joins with its neighbours at most
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # Rust's from_str_radix allows the sign


class IncrementalDecoder:
    """Decodes the tokens of one text.

    Args:
        piece_of: returns the piece that a token gives the first stage; None if it stands for no text.
        stages: new stages, in order, at least one.
        prompt: tokens before the text, of which the last few affect its start. Their text is not returned, except a
            character that starts in them and ends in the text.
    """

    def __init__(self, piece_of: Callable[[int], Piece | None], stages: Sequence[Stage], prompt: Sequence[int] = ()):
        self._piece_of, self._first, self._others = piece_of, stages[0], stages[1:]
        # Text of the prompt that the stages still hold, and return with later text.
        self._held = ""
        for token in prompt[-CONTEXT_TOKENS:]:
            self(int(token))
        if len(prompt):
            self._held = self._copy()._finish()

    def __call__(self, token: int | None) -> str:
        """Returns the text that a token completes; None ends the text and returns the rest."""
        text = self._finish() if token is None else self._push(token)
        if self._held and text:
            num_held = min(len(self._held), len(text))
            is_same = self._held[:num_held] == text[:num_held]
            self._held, text = (self._held[num_held:], text[num_held:]) if is_same else ("", text)
        return text

    def _push(self, token: int) -> str:
        piece = self._piece_of(token)
        if piece is None:
            return ""
        pieces = self._first.push(piece)
        for stage in self._others:
            pieces = [text for piece in pieces for text in stage.push(piece)]
        return "".join(pieces)

    def pending(self) -> str:
        """Returns the whole characters that would follow if the text ended here; "" if there are none.

        Stop strings end a text at these: "\\n" is a byte token of Llama 2, and no other token need follow it.
        """
        stages = (self._first, *self._others)
        is_held = isinstance(self._first, ByteFallbackStage) and self._first.has_whole_characters
        if not is_held or any(isinstance(stage, WholeTextStage) for stage in stages):
            return ""
        return self._copy()(None)

    def _copy(self) -> "IncrementalDecoder":
        copied = copy.copy(self)
        copied._first, *copied._others = (copy.deepcopy(stage) for stage in (self._first, *self._others))
        return copied

    def _finish(self) -> str:
        pieces = list(self._first.finish())
        for stage in self._others:
            # A stage takes the rest of the previous one, and then returns its own.
            pieces = [text for piece in pieces for text in stage.push(piece)]
            pieces += stage.finish()
        return "".join(pieces)


class TokenizerDecoder:
    """The pieces of text of a tokenizer's tokens; `start` begins a text.

    Args:
        tokenizer: a `tokenizers.Tokenizer`. Its vocabulary and decoder must not change.

    Attributes:
        is_total: the package's own `decode` returns a text for every list of ids. It fails for texts that are shorter
            than what a Strip stage drops at the end.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        self._pieces = _Pieces(self._find_piece)
        steps = _flatten(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder is not None else None
        self.is_total = not any(step["type"] == "Strip" and step["stop"] for step in steps or ())
        self._functions, self._makers = _compile(steps)

    def start(self, prompt: Sequence[int] = ()) -> IncrementalDecoder:
        """Returns a decoder for a new text, or for the continuation of a prompt."""
        return IncrementalDecoder(self._pieces.__getitem__, [make() for make in self._makers], prompt)

    def _find_piece(self, token: int) -> Piece | None:
        with rust_errors("the tokenizer cannot decode this id"):
            piece = self._tokenizer.id_to_token(int(token))
            # Special tokens have no text, and neither has a token of the vocabulary with the same name.
            if piece is None or piece in self._special:
                return None
            for function in self._functions:
                piece = function(piece)
        return piece


class _Pieces(dict[int, Piece | None]):
    """Pieces of the tokens that were needed so far."""

    def __init__(self, find: Callable[[int], Piece | None]):
        super().__init__()
        self._find = find

    def __missing__(self, token: int) -> Piece | None:
        self[token] = piece = self._find(token)
        return piece


def _compile(steps: list[dict[str, Any]] | None) -> tuple[list[Callable], list[Callable[[], Stage]]]:
    """Returns the functions of one token in front of the first stage with a state, and makers of all later stages."""
    if steps is None:
        return [lambda piece: (piece, " " + piece)], [FirstTokenStage]
    functions: list[Callable[[Any], Any]] = []
    makers: list[Callable[[], Stage]] = []
    is_fused = False
    for place, step in enumerate(steps):
        found = (_fused_stage if is_fused else _token_stage)(step)
        if found is None:
            rest = _rust_decoder({"type": "Sequence", "decoders": steps[place:]})
            makers.append(functools.partial(WholeTextStage, rest, is_fused))
            break
        function, maker = found
        if function is not None and not makers:
            functions.append(function)
        elif function is not None:
            makers.append(functools.partial(MapStage, function))
        if maker is not None:
            makers.append(maker)
        is_fused = is_fused or step["type"] in ("Fuse", "ByteLevel")
    return functions, makers or [functools.partial(MapStage, str)]


def _token_stage(step: dict[str, Any]) -> tuple[Callable | None, Callable[[], Stage] | None] | None:
    """Returns a function of one token and the stage after it, for a step whose pieces are tokens; None if unknown."""
    kind = step["type"]
    if kind == "Fuse":
        return None, None
    if kind == "ByteLevel":
        return _bytes_of_letters, Utf8Stage
    if kind == "ByteFallback":
        return _byte_of_name, ByteFallbackStage
    if kind == "Strip":
        return (lambda piece: "".join(StripStage(step["content"], step["start"], step["stop"]).push(piece))), None
    # The decoder of the package, applied to one token, gives its piece.
    decoder = _rust_decoder(step)
    if kind == "Replace":
        return (lambda piece: decoder.decode([piece])), None
    if kind in ("Metaspace", "WordPiece"):
        return (lambda piece: (decoder.decode([piece]), decoder.decode(["", piece]))), FirstTokenStage
    if kind == "BPEDecoder" and step["suffix"]:
        return (lambda piece: (decoder.decode([piece, ""]), decoder.decode([piece]))), LastTokenStage
    if kind == "CTC":
        return (lambda piece: (piece, decoder.decode([piece]))), ChangedTokenStage
    return None


def _fused_stage(step: dict[str, Any]) -> tuple[Callable | None, Callable[[], Stage] | None] | None:
    """Returns them for a step that gets one piece in parts, after the pieces were joined."""
    kind = step["type"]
    if kind == "Fuse":
        return None, None
    if kind == "Strip":
        return None, functools.partial(StripStage, step["content"], step["start"], step["stop"])
    if kind == "Replace" and (pattern := step["pattern"].get("String")):
        return None, functools.partial(ReplaceStage, pattern, step["content"])
    return None


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the steps of a decoder, without nesting."""
    if step["type"] != "Sequence":
        return [step]
    return [each for inner in step["decoders"] for each in _flatten(inner)]


def _rust_decoder(step: dict[str, Any]) -> Any:
    """Makes a decoder of the tokenizers package."""
    import tokenizers

    values = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "decoder": step}
    return tokenizers.Tokenizer.from_str(json.dumps(values)).decoder


def _byte_of_name(piece: str) -> str | bytes:
    """Returns the byte of a token such as <0xE5>; other tokens as they are."""
    found = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(found[1], 16)]) if found else piece


def _bytes_of_letters(piece: str) -> bytes:
    """Returns the bytes of a byte-level token; a token with other letters, such as an added one, is already text."""
    try:
        return bytes(map(BYTE_OF_LETTER.__getitem__, piece))
    except KeyError:
        return piece.encode()
