"""GPT-2's mapping from the 256 bytes to letters, which byte-level tokenizers use in their vocabularies."""

# Printable bytes map to themselves, and the other bytes map to letters from U+0100 upward.
_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)

LETTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
BYTE_OF_LETTER = {letter: byte for byte, letter in LETTER_OF_BYTE.items()}
