"""The functions of tilewise.compat.bert_padding."""

from tilewise.compat.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
)

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]
