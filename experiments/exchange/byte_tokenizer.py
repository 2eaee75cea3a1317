"""A tokenizer of single bytes as transformers' `AutoTokenizer` reads it: token i is byte i."""

from typing import Any


def tokenizer(context: int) -> dict[str, dict[str, Any]]:
    """File name -> contents, as JSON.

    It is a byte-level BPE without merges: GPT-2's own scheme writes every byte as a printable character, and
    the vocabulary gives that character the byte's number.

    Args:
      context: tokens that the model takes at most.
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {character: byte for byte, character in enumerate(_characters())},
        "merges": [],
    }
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": model,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
    }


def _characters() -> list[str]:
    """GPT-2's character for each byte: its own where that is visible, else one of those from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
