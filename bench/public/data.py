"""Small data for public scripts, made from a seed: each function takes the folder that a script is started in."""

from __future__ import annotations

import json
import pickle
import random
import struct
from pathlib import Path

import numpy as np

_WORDS = [
    f"{first}{second}" for first in ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi") for second in ("ra", "sen", "til", "mo")
]


def nothing(folder: Path) -> None:
    """For scripts that make their data themselves."""


def tokens(folder: Path) -> None:
    """nanoGPT's data/openwebtext, 16 bits a token."""
    _draw_tokens(folder / "data" / "openwebtext", {"train": 20_000, "val": 2_000})
    (folder / "data" / "openwebtext" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 512}))


def stories(folder: Path) -> None:
    """llama2.c's data/tok512, two shards of 16 bits a token."""
    _draw_tokens(folder / "data" / "tok512", {"data00": 20_000, "data01": 20_000})


def _draw_tokens(folder: Path, files: dict[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(1)
    for name, count in files.items():
        (draw.zipf(1.5, count) % 500).astype(np.uint16).tofile(folder / f"{name}.bin")


def text(folder: Path) -> None:
    """input.txt, a line of words each."""
    draw = random.Random(1)
    lines = (" ".join(draw.choices(_WORDS, k=12)) for _ in range(500))
    (folder / "input.txt").write_text("\n".join(lines))


def wikitext(folder: Path) -> None:
    """data/wikitext-2.txt of Lightning's demo."""
    (folder / "data").mkdir(exist_ok=True)
    draw = random.Random(1)
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(" ".join(draw.choices(_WORDS, k=20)) for _ in range(3_500)))


def images(folder: Path) -> None:
    """images/train and images/val, four classes."""
    for split, each in (("train", 64), ("val", 4)):
        for label in range(4):
            _draw_images(folder / "images" / split / f"class{label}", each, f"{split}{label}_{{}}.jpg")


def boxes(folder: Path) -> None:
    """boxes.yaml and its images, each with one object."""
    for split, count in (("train", 256), ("val", 8)):
        _draw_images(folder / "boxes" / "images" / split, count, "{}.jpg")
        (folder / "boxes" / "labels" / split).mkdir(parents=True)
        for index in range(count):
            (folder / "boxes" / "labels" / split / f"{index}.txt").write_text(f"{index % 4} 0.5 0.5 0.{2 + index % 5} 0.4\n")
    names = "".join(f"  {label}: class{label}\n" for label in range(4))
    (folder / "boxes.yaml").write_text(f"path: boxes\ntrain: images/train\nval: images/val\nnames:\n{names}")


def pets(folder: Path) -> None:
    """pets, whose file names have their labels."""
    for label in range(4):
        _draw_images(folder / "pets", 120, f"breed{chr(97 + label)}_{{}}.jpg", label)


def _draw_images(folder: Path, count: int, name: str, seed: int = 0) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    for index in range(count):
        small = Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8))
        small.resize((72, 72), Image.Resampling.BILINEAR).save(folder / name.format(index))


def mnist(folder: Path) -> None:
    """data/MNIST/raw, as torchvision reads it."""
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(1)
    for split, count in (("train", 1_100), ("t10k", 32)):
        pixels = draw.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + pixels.tobytes())
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def images_and_vae(folder: Path) -> None:
    """Images, and a small autoencoder where DiT looks for a published one."""
    import torch
    from diffusers.models import AutoencoderKL

    images(folder)
    torch.manual_seed(1)
    levels = ["DownEncoderBlock2D"] * 4, ["UpDecoderBlock2D"] * 4
    vae = AutoencoderKL(
        down_block_types=levels[0], up_block_types=levels[1], block_out_channels=(8,) * 4, norm_num_groups=4, latent_channels=4
    )
    for name in ("ema", "mse"):
        vae.save_pretrained(folder / "stabilityai" / f"sd-vae-ft-{name}")


def images_and_unet(folder: Path) -> None:
    """Images, and the configuration of a small UNet."""
    from diffusers import UNet2DModel

    images(folder)
    UNet2DModel(
        sample_size=32, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).save_config(folder / "unet")  # fmt: skip


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(special + _WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[SEP]", bos_token="[CLS]", **names)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def bert_and_pairs(folder: Path) -> None:
    """A small BERT, pairs of sentences and their metric, under the names that accelerate's examples take from a hub."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=64,
    )
    BertForSequenceClassification(config).save_pretrained(folder / "bert-base-cased")
    _tokenizer(folder / "bert-base-cased")
    pairs = folder / "nyu-mll" / "glue"
    pairs.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    for split, count in (("train", 1_280), ("validation", 32)):
        rows = ({"sentence1": _sentence(draw), "sentence2": _sentence(draw), "label": draw.randrange(2), "idx": index}
                for index in range(count))  # fmt: skip
        (pairs / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (pairs / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        "  - split: validation\n    path: validation.jsonl\n---\n"
    )
    metric = folder / "glue"
    metric.mkdir(exist_ok=True)
    (metric / "glue.py").write_text(
        "import datasets\nimport evaluate\n\n\nclass Glue(evaluate.Metric):\n    def _info(self):\n"
        "        features = datasets.Features(dict.fromkeys(('predictions', 'references'), datasets.Value('int64')))\n"
        "        return evaluate.MetricInfo(description='', citation='', inputs_description='', features=features)\n\n"
        "    def _compute(self, predictions, references):\n"
        "        return {'accuracy': sum(p == r for p, r in zip(predictions, references)) / len(references)}\n"
    )


def _sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(4, 10)))


def _decoder(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=384, max_position_embeddings=128, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    _tokenizer(folder / "model")


def language(folder: Path) -> None:
    """A small decoder, and text for it."""
    _decoder(folder)
    draw = random.Random(1)
    (folder / "prepared").mkdir(exist_ok=True)
    for split in ("train", "test"):
        (folder / "prepared" / f"{split}.jsonl").write_text(
            "\n".join(json.dumps({"text": _sentence(draw)}) for _ in range(300))
        )


def preferences(folder: Path) -> None:
    """A small decoder, and for each prompt an answer that is preferred to another."""
    _decoder(folder)
    draw = random.Random(1)
    (folder / "prepared").mkdir(exist_ok=True)
    for split in ("train", "test"):
        rows = ({name: _sentence(draw) for name in ("prompt", "chosen", "rejected")} for _ in range(300))
        (folder / "prepared" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
