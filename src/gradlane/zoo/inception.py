"""Classifiers of inception blocks; branches run one after another, as on a device with one stream."""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.zoo.layers import Net

Conv = tuple[int, int | tuple[int, int], int, int | tuple[int, int]]  # channels, kernel, stride, padding


def googlenet() -> Net:
    """GoogLeNet (Szegedy 2015) without normalisation and with both auxiliary heads, as Caffe
    defines it.

    64 layers with a weight and a bias each, the network that MG-WFBP recorded.
    """
    net = Net(3, 224, 224)
    net.conv("conv1/7x7_s2", 64, 7, 2, 3)
    net.relu()
    net.pool(3, 2, ceil=True)
    net.conv("conv2/3x3_reduce", 64, 1)
    net.relu()
    net.conv("conv2/3x3", 192, 3, 1, 1)
    net.relu()
    net.pool(3, 2, ceil=True)
    blocks: list[tuple[str, tuple[int, ...]]] = [
        ("3a", (64, 96, 128, 16, 32, 32)), ("3b", (128, 128, 192, 32, 96, 64)), ("4a", (192, 96, 208, 16, 48, 64)),
        ("4b", (160, 112, 224, 24, 64, 64)), ("4c", (128, 128, 256, 24, 64, 64)), ("4d", (112, 144, 288, 32, 64, 64)),
        ("4e", (256, 160, 320, 32, 128, 128)), ("5a", (256, 160, 320, 32, 128, 128)), ("5b", (384, 192, 384, 48, 128, 128)),
    ]  # fmt: skip
    for name, (one, reduce3, three, reduce5, five, pooled) in blocks:
        if name in ("4a", "5a"):
            net.pool(3, 2, ceil=True)
        entered = net.shape
        for branch in (
            [("1x1", one, 1)],
            [("3x3_reduce", reduce3, 1), ("3x3", three, 3)],
            [("5x5_reduce", reduce5, 1), ("5x5", five, 5)],
            [("pool_proj", pooled, 1)],
        ):
            net.shape = entered
            for part, out, kernel in branch:
                net.conv(f"inception_{name}/{part}", out, kernel, 1, kernel // 2)
                net.relu()
        net.concatenate(one + three + five + pooled, entered)
        if name in ("4a", "4d"):
            left = net.shape
            loss = "loss1" if name == "4a" else "loss2"
            net.pool(5, 3)
            net.conv(f"{loss}/conv", 128, 1)
            net.relu()
            net.flatten()
            net.linear(f"{loss}/fc", 1024)
            net.relu()
            net.linear(f"{loss}/classifier", 1000)
            net.shape = left
    net.average()
    net.flatten()
    net.linear("loss3/classifier", 1000)
    return net


def _conv(net: Net, name: str, conv: Conv) -> None:
    out, kernel, stride, pad = conv
    net.conv(f"{name}.conv", out, kernel, stride, pad, bias=False)
    net.norm(f"{name}.bn")


def _branches(net: Net, block: str, branches: Sequence[Sequence[tuple[str, Conv]]], pooled: int = 0) -> None:
    """Run each branch from the block's input; concatenate their channels and `pooled` ones."""
    entered = net.shape
    channels, out = pooled, entered
    for branch in branches:
        net.shape = entered
        for name, conv in branch:
            _conv(net, f"{block}.{name}", conv)
        out = net.shape
        channels += net.channels
    net.concatenate(channels, out)


def inception_v3() -> Net:
    """Inception-v3 (Szegedy 2016) at 299 x 299 with its auxiliary head, as torchvision defines it."""
    net = Net(3, 299, 299)
    for name, conv in (("1a_3x3", (32, 3, 2, 0)), ("2a_3x3", (32, 3, 1, 0)), ("2b_3x3", (64, 3, 1, 1))):
        _conv(net, f"Conv2d_{name}", conv)
    net.pool(3, 2)
    _conv(net, "Conv2d_3b_1x1", (80, 1, 1, 0))
    _conv(net, "Conv2d_4a_3x3", (192, 3, 1, 0))
    net.pool(3, 2)
    for name, pooled in (("5b", 32), ("5c", 64), ("5d", 64)):
        _branches(net, f"Mixed_{name}", [
            [("branch1x1", (64, 1, 1, 0))],
            [("branch5x5_1", (48, 1, 1, 0)), ("branch5x5_2", (64, 5, 1, 2))],
            [("branch3x3dbl_1", (64, 1, 1, 0)), ("branch3x3dbl_2", (96, 3, 1, 1)), ("branch3x3dbl_3", (96, 3, 1, 1))],
            [("branch_pool", (pooled, 1, 1, 0))],
        ])  # fmt: skip
    _branches(net, "Mixed_6a", [
        [("branch3x3", (384, 3, 2, 0))],
        [("branch3x3dbl_1", (64, 1, 1, 0)), ("branch3x3dbl_2", (96, 3, 1, 1)), ("branch3x3dbl_3", (96, 3, 2, 0))],
    ], pooled=net.channels)  # fmt: skip
    row, column = ((1, 7), (0, 3)), ((7, 1), (3, 0))
    for name, c in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        _branches(net, f"Mixed_{name}", [
            [("branch1x1", (192, 1, 1, 0))],
            [("branch7x7_1", (c, 1, 1, 0)), ("branch7x7_2", (c, row[0], 1, row[1])),
             ("branch7x7_3", (192, column[0], 1, column[1]))],
            [("branch7x7dbl_1", (c, 1, 1, 0)), ("branch7x7dbl_2", (c, column[0], 1, column[1])),
             ("branch7x7dbl_3", (c, row[0], 1, row[1])), ("branch7x7dbl_4", (c, column[0], 1, column[1])),
             ("branch7x7dbl_5", (192, row[0], 1, row[1]))],
            [("branch_pool", (192, 1, 1, 0))],
        ])  # fmt: skip
    left = net.shape
    net.pool(5, 3)
    _conv(net, "AuxLogits.conv0", (128, 1, 1, 0))
    _conv(net, "AuxLogits.conv1", (768, 5, 1, 0))
    net.average()
    net.flatten()
    net.linear("AuxLogits.fc", 1000)
    net.shape = left
    _branches(net, "Mixed_7a", [
        [("branch3x3_1", (192, 1, 1, 0)), ("branch3x3_2", (320, 3, 2, 0))],
        [("branch7x7x3_1", (192, 1, 1, 0)), ("branch7x7x3_2", (192, row[0], 1, row[1])),
         ("branch7x7x3_3", (192, column[0], 1, column[1])), ("branch7x7x3_4", (192, 3, 2, 0))],
    ], pooled=net.channels)  # fmt: skip
    for name in ("7b", "7c"):
        _split_block(net, f"Mixed_{name}", 320, 384, 448, 192)
    net.average()
    net.flatten()
    net.linear("fc", 1000)
    return net


def _split_block(net: Net, block: str, one: int, split: int, deep: int, pooled: int) -> None:
    """A block whose 3 x 3 branches end in a 1 x 3 and a 3 x 1 convolution."""
    entered = net.shape
    row, column = ((1, 3), (0, 1)), ((3, 1), (1, 0))
    _conv(net, f"{block}.branch1x1", (one, 1, 1, 0))
    stems: dict[str, list[Conv]] = {"branch3x3": [(split, 1, 1, 0)], "branch3x3dbl": [(deep, 1, 1, 0), (split, 3, 1, 1)]}
    for name, stem in stems.items():
        net.shape = entered
        for number, conv in enumerate(stem, 1):
            _conv(net, f"{block}.{name}_{number}", conv)
        middle = net.shape
        for letter, (kernel, pad) in zip("ab", (row, column), strict=True):
            net.shape = middle
            _conv(net, f"{block}.{name}_{len(stem) + 1}{letter}", (split, kernel, 1, pad))
    net.shape = entered
    _conv(net, f"{block}.branch_pool", (pooled, 1, 1, 0))
    net.concatenate(one + 4 * split + pooled, entered)


def inception_v4(size: int = 224) -> Net:
    """Inception-v4 (Szegedy 2017), as timm defines it; at 224 x 224, as MG-WFBP trained it."""
    net = Net(3, size, size)
    place = 0

    def one(out: int) -> Conv:
        return (out, 1, 1, 0)

    def three(out: int) -> Conv:
        return (out, 3, 1, 1)

    def block(branches: Sequence[Sequence[Conv]], pooled: int = 0) -> None:
        nonlocal place
        named = [
            [(_place(b, index, len(branch), len(branches)), conv) for index, conv in enumerate(branch)]
            for b, branch in enumerate(branches)
        ]
        _branches(net, f"features.{place}", named, pooled)
        place += 1

    for out, stride, pad in ((32, 2, 0), (32, 1, 0), (64, 1, 1)):
        _conv(net, f"features.{place}", (out, 3, stride, pad))
        place += 1
    block([[(96, 3, 2, 0)]], pooled=net.channels)
    block([[one(64), (96, 3, 1, 0)], [one(64), (64, (1, 7), 1, (0, 3)), (64, (7, 1), 1, (3, 0)), (96, 3, 1, 0)]])
    block([[(192, 3, 2, 0)]], pooled=net.channels)
    for _ in range(4):
        block([[one(96)], [one(64), three(96)], [one(64), three(96), three(96)], [one(96)]])
    block([[(384, 3, 2, 0)], [one(192), three(224), (256, 3, 2, 0)]], pooled=net.channels)
    for _ in range(7):
        block([
            [one(384)],
            [one(192), (224, (1, 7), 1, (0, 3)), (256, (7, 1), 1, (3, 0))],
            [one(192), (192, (7, 1), 1, (3, 0)), (224, (1, 7), 1, (0, 3)), (224, (7, 1), 1, (3, 0)), (256, (1, 7), 1, (0, 3))],
            [one(128)],
        ])  # fmt: skip
    block(
        [[one(192), (192, 3, 2, 0)], [one(256), (256, (1, 7), 1, (0, 3)), (320, (7, 1), 1, (3, 0)), (320, 3, 2, 0)]],
        pooled=net.channels,
    )
    for _ in range(3):
        entered = net.shape
        _conv(net, f"features.{place}.branch0", one(256))
        net.shape = entered
        _conv(net, f"features.{place}.branch1_0", one(384))
        _pair(net, f"features.{place}.branch1_1")
        net.shape = entered
        stem: list[Conv] = [one(384), (448, (3, 1), 1, (1, 0)), (512, (1, 3), 1, (0, 1))]
        for number, conv in enumerate(stem):
            _conv(net, f"features.{place}.branch2_{number}", conv)
        _pair(net, f"features.{place}.branch2_3")
        net.shape = entered
        _conv(net, f"features.{place}.branch3.1", one(256))
        net.concatenate(1536, entered)
        place += 1
    net.average()
    net.flatten()
    net.linear("last_linear", 1000)
    return net


def _place(branch: int, index: int, convs: int, branches: int) -> str:
    """A convolution's name in its block: the fourth branch pools first."""
    if branches == 1:
        return "conv"
    if branch == 3:
        return "branch3.1"
    return f"branch{branch}" if convs == 1 else f"branch{branch}.{index}"


def _pair(net: Net, name: str) -> None:
    middle = net.shape
    for letter, kernel, pad in (("a", (1, 3), (0, 1)), ("b", (3, 1), (1, 0))):
        net.shape = middle
        _conv(net, f"{name}{letter}", (256, kernel, 1, pad))
