"""Text with words and breaks that tokenizers and sentence splitters disagree on."""

import random

WORDS = (
    "The the cat can't n't 1,000.5 <unk> <unk>a <UNK> -- ... self-made <unk><unk> . Mr. etc. end. Then? na\u00efve "
    "e\u0301 x\u00b2 \u65e5\u672c \u1112\u1161 \u03a3\u0391\u03a3 \u0130 \u2019s it\u2019s \u200b \u24b6 u\u0308. "
    "_a\u203fb \U0001f600 \ufb01"
)


def text_of(seed: int, words: int) -> str:
    draw = random.Random(seed)
    odd = WORDS.split()
    blanks = [" ", " ", " ", "\n", ". ", "\n\n", "\n \n"]
    return "".join(draw.choice(odd) + draw.choice(blanks) for _ in range(words))
