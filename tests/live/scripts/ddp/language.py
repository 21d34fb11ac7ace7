"""A small causal transformer: AdamW, a learning rate that warms up, gradients clipped by norm."""

import argparse
import os

import torch
import torch.distributed as dist
from checksum import summary
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH = 64, 32


class LanguageModel(nn.Module):
    def __init__(self, width=48, layers=2, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        return self.head(self.norm(self.encoder(x, mask=self.mask, is_causal=True)))


def parameter_groups(model, weight_decay):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def get_batch(generator, size):
    """Sequences that count on from a random start by a random stride."""
    start = torch.randint(VOCABULARY, (size, 1), generator=generator)
    stride = torch.randint(1, 4, (size, 1), generator=generator)
    sequence = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return sequence[:, :-1], sequence[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()

    dist.init_process_group(backend="gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1234 + rank)
    generator = torch.Generator().manual_seed(rank)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=3e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.warmup))
    criterion = nn.CrossEntropyLoss()

    losses = []
    for _ in range(args.steps):
        tokens, targets = get_batch(generator, args.batch_size)
        logits = model(tokens)
        loss = criterion(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        losses += [loss.item(), norm.item()]

    if rank == 0:
        print(summary([model], [optimizer], losses))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
