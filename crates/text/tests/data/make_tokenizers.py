"""Trains three tiny tokenizers and writes what the Python library makes of some texts to expected.json.

Run: python make_tokenizers.py (needs tokenizers)
"""
import json
import pathlib

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = pathlib.Path(__file__).parent / "tokenizers"
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen liquor jugs; the five boxing wizards jump quickly.",
    "Größe, façade, naïve, čeština, Ελληνικά, русский, 日本語, 한국어 and 🦙 are words too.",
    "def main(argument):\n    return argument + 1234\n",
    "It's what we've always said: don't stop, they're here!",
] * 4
TEXTS = [
    "", " ", "  ", "Hello", "Hello world", " Hello  world ", "the quick brown fox", "don't\n\n\tstop 12345!",
    "Größe 日本語 🦙🦙 русский", "<s>Hello</s>", "a<|end|>b <|end|> c", "<|user|>quick", "zzz\u0301 \u200d ~~~",
    "\r\n \r\n", "x" * 60,
]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>", "<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<|user|>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentencepiece():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"] + bytes_, limit_alphabet=40, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Byte tokens are part of the vocabulary, not special: only the first three may stay added.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def main():
    FOLDER.mkdir(exist_ok=True)
    expected = {}
    for name, make in [("byte-level", byte_level), ("sentencepiece", sentencepiece), ("wordpiece", wordpiece)]:
        tokenizer = make()
        tokenizer.save(str(FOLDER / f"{name}.json"), pretty=False)
        cases = expected[name] = []
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            tokenizer.encode_special_tokens = True
            plain = tokenizer.encode(text, add_special_tokens=False).ids
            tokenizer.encode_special_tokens = False
            cases.append({
                "text": text,
                "ids": ids,
                "plain_ids": plain,
                "with_special": tokenizer.encode(text, add_special_tokens=True).ids,
                "decoded": tokenizer.decode(ids, skip_special_tokens=False),
                "decoded_without_special": tokenizer.decode(ids, skip_special_tokens=True),
            })
    (FOLDER / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


main()
