"""Small sentence transformers with random weights, and sentences for them. Nothing is downloaded."""

from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = "a the cat dog sat on mat ran far home red blue green tree sky sun moon night day rain"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
COLUMNS = {
    "anchor": ["a cat sat", "the dog ran far", "red sky", "the moon", "rain", "a green tree on the mat"],
    "positive": ["the cat", "a dog ran home", "blue sky on a day", "night moon", "rain rain day", "tree"],
    "negative_1": ["dog", "cat", "green sky at night", "sun", "the sun", "red tree"],
    "negative_2": ["home home", "the mat", "day", "day sun day", "a cat ran", "sky"],
}


def tiny_model(folder, dropout=0.0, width=16, layers=1, words=WORDS):
    """A SentenceTransformer of a BERT with one layer and mean pooling, its files written into a folder."""
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate((*SPECIAL, *words.split()))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    frame = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=frame)
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 32}
    sizes |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = BertConfig(vocab_size=len(SPECIAL) + len(words.split()), **sizes)
    # A model made from the folder before may have its file mapped, and safetensors before 0.8 writes into it.
    Path(folder, "model.safetensors").unlink(missing_ok=True)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return loaded_model(folder)


def loaded_model(folder):
    """The same from the files that `tiny_model` has written."""
    transformer = modules.Transformer(str(folder), max_seq_length=32)
    width = transformer.get_embedding_dimension()
    return SentenceTransformer(modules=[transformer, modules.Pooling(width, pooling_mode="mean")], device="cpu")


def features(model, columns=4):
    """The arguments that the trainer gives to a loss."""
    return [dict(model.preprocess(texts)) for texts in list(COLUMNS.values())[:columns]]
