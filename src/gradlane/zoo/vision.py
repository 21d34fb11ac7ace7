"""Image classifiers with one branch, or with residual or dense blocks; `inception` has the others."""

from __future__ import annotations

from gradlane.zoo.layers import Net


def alexnet() -> Net:
    """AlexNet in one column (Krizhevsky 2014), as torchvision defines it."""
    net = Net(3, 224, 224)
    for index, (out, kernel, stride, pad, pooled) in enumerate(
        [(64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False), (256, 3, 1, 1, True)]
    ):
        net.conv(f"features.{(0, 3, 6, 8, 10)[index]}", out, kernel, stride, pad)
        net.relu()
        if pooled:
            net.pool(3, 2)
    net.average(6)
    net.flatten()
    _classifier(net, (1, 4, 6), (4096, 4096, 1000))
    return net


def _classifier(net: Net, places: tuple[int, ...], widths: tuple[int, ...]) -> None:
    for place, width in zip(places, widths, strict=True):
        net.linear(f"classifier.{place}", width)
        if place != places[-1]:
            net.relu()


def vgg(blocks: tuple[int, ...], size: int = 224, classes: int = 1000, hidden: int = 4096, average: bool = True) -> Net:
    """VGG (Simonyan & Zisserman 2015); `blocks` convolutions before each pooling."""
    net = Net(3, size, size)
    place = 0
    for count, out in zip(blocks, (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            net.conv(f"features.{place}", out, 3, 1, 1)
            net.relu()
            place += 2
        net.pool(2, 2)
        place += 1
    if average:
        net.average(7)
    net.flatten()
    _classifier(net, (0, 3, 6), (hidden, hidden, classes))
    return net


def resnet(blocks: tuple[int, ...], bottleneck: bool) -> Net:
    """ResNet (He 2016) with the stride in the 3 x 3 convolution, as torchvision defines it."""
    net = Net(3, 224, 224)
    net.conv("conv1", 64, 7, 2, 3, bias=False)
    net.norm("bn1")
    net.pool(3, 2, 1)
    for stage, count in enumerate(blocks):
        width = 64 << stage
        out = width * 4 if bottleneck else width
        for index in range(count):
            name = f"layer{stage + 1}.{index}"
            stride = 2 if stage and not index else 1
            entered = net.shape
            convs = (
                [(width, 1, 1, 0), (width, 3, stride, 1), (out, 1, 1, 0)]
                if bottleneck
                else [(out, 3, stride, 1), (out, 3, 1, 1)]
            )
            for number, (channels, kernel, step, pad) in enumerate(convs, 1):
                net.conv(f"{name}.conv{number}", channels, kernel, step, pad, bias=False)
                net.norm(f"{name}.bn{number}", relu=number < len(convs))
            left = net.shape
            if stride != 1 or entered[0] != out:
                net.shape = entered
                net.conv(f"{name}.downsample.0", out, 1, stride, bias=False)
                net.norm(f"{name}.downsample.1", relu=False)
            net.shape = left
            net.relu()  # and the addition
    net.average()
    net.flatten()
    net.linear("fc", 1000)
    return net


def densenet(blocks: tuple[int, ...], growth: int, first: int) -> Net:
    """DenseNet-BC (Huang 2017) with bottlenecks of four times the growth, as torchvision defines
    it.
    """
    net = Net(3, 224, 224)
    net.conv("features.conv0", first, 7, 2, 3, bias=False)
    net.norm("features.norm0")
    net.pool(3, 2, 1)
    for block, count in enumerate(blocks, 1):
        for index in range(1, count + 1):
            name = f"features.denseblock{block}.denselayer{index}"
            entered = net.shape
            net.norm(f"{name}.norm1")
            net.conv(f"{name}.conv1", 4 * growth, 1, bias=False)
            net.norm(f"{name}.norm2")
            net.conv(f"{name}.conv2", growth, 3, 1, 1, bias=False)
            net.concatenate(entered[0] + growth, entered)
        if block < len(blocks):
            net.norm(f"features.transition{block}.norm")
            net.conv(f"features.transition{block}.conv", net.channels // 2, 1, bias=False)
            net.pool(2, 2)
    net.norm("features.norm5")
    net.average()
    net.flatten()
    net.linear("classifier", 1000)
    return net


def mobilenet() -> Net:
    """MobileNet (Howard 2017) of width 1."""
    net = Net(3, 224, 224)
    net.conv("conv_stem", 32, 3, 2, 1, bias=False)
    net.norm("bn1")
    blocks = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for index, (out, stride) in enumerate(blocks):
        net.conv(f"blocks.{index}.conv_dw", net.channels, 3, stride, 1, groups=net.channels, bias=False)
        net.norm(f"blocks.{index}.bn1")
        net.conv(f"blocks.{index}.conv_pw", out, 1, bias=False)
        net.norm(f"blocks.{index}.bn2")
    net.average()
    net.flatten()
    net.linear("classifier", 1000)
    return net


def yolo() -> Net:
    """YOLO's first version (Redmon 2016): 24 convolutions and 2 fully connected layers.

    Geryon trained this version: 78 % of its parameters are in the fully connected layers (Geryon
    Fig. 6), which later versions do not have. Its output is 7 x 7 cells of 30 values.
    """
    net = Net(3, 448, 448)
    place = 0

    def conv(out: int, kernel: int, stride: int = 1) -> None:
        nonlocal place
        net.conv(f"conv{place}", out, kernel, stride, kernel // 2)
        net.relu()
        place += 1

    conv(64, 7, 2)
    net.pool(2, 2)
    conv(192, 3)
    net.pool(2, 2)
    for out, kernel in ((128, 1), (256, 3), (256, 1), (512, 3)):
        conv(out, kernel)
    net.pool(2, 2)
    for out, kernel in (*[(256, 1), (512, 3)] * 4, (512, 1), (1024, 3)):
        conv(out, kernel)
    net.pool(2, 2)
    for out, kernel in (*[(512, 1), (1024, 3)] * 2, (1024, 3)):
        conv(out, kernel)
    conv(1024, 3, 2)
    conv(1024, 3)
    conv(1024, 3)
    net.flatten()
    net.linear("fc0", 4096)
    net.relu()
    net.linear("fc1", 7 * 7 * 30)
    return net


def yolov2() -> Net:
    """YOLOv2 (Redmon 2017) at 416 x 416: Darknet-19 without its classifier, a passthrough, 5 boxes
    of 85 values.
    """
    net = Net(3, 416, 416)
    place = 0

    def conv(out: int, kernel: int) -> None:
        nonlocal place
        net.conv(f"conv{place}", out, kernel, 1, kernel // 2, bias=False)
        net.norm(f"bn{place}")
        place += 1

    for block in ((32,), (64,), (128, 64, 128), (256, 128, 256), (512, 256, 512, 256, 512)):
        for index, out in enumerate(block):
            conv(out, 1 if index % 2 else 3)
        passed = net.shape
        net.pool(2, 2)
    for index, out in enumerate((1024, 512, 1024, 512, 1024)):
        conv(out, 1 if index % 2 else 3)
    conv(1024, 3)
    conv(1024, 3)
    deep = net.shape
    net.shape = passed
    conv(64, 1)
    net.concatenate(deep[0] + 64 * 4, deep)  # 26 x 26 cells become 13 x 13 of four times the channels
    conv(1024, 3)
    net.conv(f"conv{place}", 5 * 85, 1)
    return net


def vit(width: int, layers: int) -> Net:
    """A ViT of patches of 16 x 16 (Dosovitskiy 2021) at 224 x 224, as torchvision defines it."""
    net = Net(3, 224, 224)
    net.conv("conv_proj", width, 16, 16)
    positions = net.shape[1] * net.shape[2] + 1
    net.shape = (positions, width)
    net.parameter("class_token", 1, 1, width)
    net.parameter("encoder.pos_embedding", 1, positions, width)
    for layer in range(layers):
        name = f"encoder.layers.encoder_layer_{layer}"
        net.layer_norm(f"{name}.ln_1")
        net.linear(f"{name}.self_attention.in_proj", 3 * width)
        projection = net.modules[-1]
        projection.tensors = [(tensor.replace("in_proj.", "in_proj_"), shape) for tensor, shape in projection.tensors]
        net.attend(width, positions, positions)
        net.linear(f"{name}.self_attention.out_proj", width)
        net.layer_norm(f"{name}.ln_2")
        net.linear(f"{name}.mlp.0", 4 * width)
        net.relu()
        net.linear(f"{name}.mlp.3", width)
    net.layer_norm("encoder.ln")
    net.shape = (width,)
    net.linear("heads.head", 1000)
    return net
