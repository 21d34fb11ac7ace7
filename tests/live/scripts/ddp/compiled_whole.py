"""A whole model that is compiled, and again after some steps, since its inputs change their shape.

torch's compiler splits its graphs where DDP's buckets end: what is fused, and so what is rounded, depends on it.
"""

import argparse

import torch
import torch.distributed as dist
from checksum import summary
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    graphs = []

    def counting(graph, inputs, **options):
        graphs.append(sum(node.op == "call_module" or node.op == "call_function" for node in graph.graph.nodes))
        return aot_eager(graph, inputs, **options)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 400), nn.ReLU(), *(nn.Linear(400, 400) for _ in range(4)), nn.Linear(400, 2))
    model = DDP(torch.compile(net, backend=counting, dynamic=False), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    random = torch.Generator().manual_seed(dist.get_rank())

    losses = []
    for step in range(args.steps):
        inputs = torch.randn(16 if step < 3 else 24, 8, generator=random)
        labels = (inputs.sum(1) > 0).long()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    if dist.get_rank() == 0:
        print(summary([model], [optimizer], losses), f"graphs {graphs}")
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): freed after the group, DDP's reducer waits for Gloo with the GIL
