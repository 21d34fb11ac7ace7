"""A generator and a discriminator, each with its optimizer and its own DistributedDataParallel."""

import argparse

import torch
import torch.distributed as dist
from checksum import summary
from torch import nn

LATENT = 16


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 32, 4, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 32, 3, 1, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 1, 4, bias=False),
    )


def real_images(count, random):
    """Bright squares at random places of dark images."""
    images = torch.full((count, 1, 8, 8), -1.0)
    for image, (row, column) in zip(images, torch.randint(0, 5, (count, 2), generator=random), strict=True):
        image[0, row : row + 3, column : column + 3] = 1.0
    return images


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()

    dist.init_process_group("gloo", init_method="env://")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random = torch.Generator().manual_seed(100 + rank)
    netG = nn.parallel.DistributedDataParallel(generator())
    netD = nn.parallel.DistributedDataParallel(discriminator())
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real, fake = torch.ones(args.batch_size), torch.zeros(args.batch_size)

    losses = []
    for _ in range(args.steps):
        # the discriminator: real images, then generated ones
        netD.zero_grad()
        error_real = criterion(netD(real_images(args.batch_size, random)).flatten(), real)
        error_real.backward()
        generated = netG(torch.randn(args.batch_size, LATENT, 1, 1, generator=random))
        error_fake = criterion(netD(generated.detach()).flatten(), fake)
        error_fake.backward()
        optimizerD.step()
        # the generator, through the updated discriminator
        netG.zero_grad()
        error = criterion(netD(generated).flatten(), real)
        error.backward()
        optimizerG.step()
        losses += [(error_real + error_fake).item(), error.item()]

    if rank == 0:
        print(summary([netG, netD], [optimizerG, optimizerD], losses))
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
