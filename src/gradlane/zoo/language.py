"""Language models: Transformers for translation, understanding and generation. A sample is a
sequence.
"""

from __future__ import annotations

from gradlane.zoo.layers import Net


def bert(width: int, layers: int, positions: int = 128) -> Net:
    """BERT, uncased (Devlin 2019) with its pooler, as transformers' BertModel defines it."""
    vocabulary = 30_522
    net = Net(positions, width)
    net.embedding("embeddings.word_embeddings", vocabulary, width, positions)
    net.embedding("embeddings.position_embeddings", 512, width, positions)
    net.embedding("embeddings.token_type_embeddings", 2, width, positions)
    net.layer_norm("embeddings.LayerNorm")
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            net.linear(f"{name}.attention.self.{part}", width)
        net.attend(width, positions, positions)
        net.linear(f"{name}.attention.output.dense", width)
        net.layer_norm(f"{name}.attention.output.LayerNorm")
        net.linear(f"{name}.intermediate.dense", 4 * width)
        net.relu()
        net.linear(f"{name}.output.dense", width)
        net.layer_norm(f"{name}.output.LayerNorm")
    net.shape = (width,)
    net.linear("pooler.dense", width)
    return net


def transformer_base(positions: int = 32) -> Net:
    """The base Transformer (Vaswani 2017); languages and output share one embedding of 37,000
    tokens.
    """
    width, layers, vocabulary = 512, 6, 37_000
    net = Net(positions, width)
    net.embedding("embedding", vocabulary, width, 2 * positions)
    net.shape = (positions, width)

    def attention(name: str) -> None:
        for part in ("query", "key", "value"):
            net.linear(f"{name}.{part}", width)
        net.attend(width, positions, positions)
        net.linear(f"{name}.out", width)
        net.layer_norm(f"{name}.norm")

    def feed_forward(name: str) -> None:
        net.linear(f"{name}.fc1", 4 * width)
        net.relu()
        net.linear(f"{name}.fc2", width)
        net.layer_norm(f"{name}.norm")

    for layer in range(layers):
        attention(f"encoder.{layer}.self")
        feed_forward(f"encoder.{layer}.feed_forward")
    for layer in range(layers):
        attention(f"decoder.{layer}.self")
        attention(f"decoder.{layer}.cross")
        feed_forward(f"decoder.{layer}.feed_forward")
    net.tied_linear(vocabulary)
    return net


def gpt2(positions: int = 1024) -> Net:
    """GPT-2 of 124 M parameters (Radford 2019), as transformers' GPT2LMHeadModel defines it; the
    output is tied.
    """
    width, layers, vocabulary = 768, 12, 50_257
    net = Net(positions, width)
    net.embedding("transformer.wte", vocabulary, width, positions)
    net.embedding("transformer.wpe", 1024, width, positions)
    for layer in range(layers):
        name = f"transformer.h.{layer}"
        net.layer_norm(f"{name}.ln_1")
        net.linear(f"{name}.attn.c_attn", 3 * width)
        net.attend(width, positions, positions, causal=True)
        net.linear(f"{name}.attn.c_proj", width)
        net.layer_norm(f"{name}.ln_2")
        net.linear(f"{name}.mlp.c_fc", 4 * width)
        net.relu()
        net.linear(f"{name}.mlp.c_proj", width)
    net.layer_norm("transformer.ln_f")
    net.tied_linear(vocabulary)
    return net


def llama_1b(positions: int = 2048) -> Net:
    """A Llama of 1.24 G parameters, of the shape of Llama 3.2 1B: grouped queries, gated
    feed-forward, tied output.
    """
    width, layers, hidden, vocabulary, key_width = 2048, 16, 8192, 128_256, 512
    net = Net(positions, width)
    net.embedding("model.embed_tokens", vocabulary, width, positions)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        net.layer_norm(f"{name}.input_layernorm", bias=False)
        for part, out in (("q", width), ("k", key_width), ("v", key_width)):
            net.shape = (positions, width)
            net.linear(f"{name}.self_attn.{part}_proj", out, bias=False)
        net.attend(width, positions, positions, causal=True)
        net.linear(f"{name}.self_attn.o_proj", width, bias=False)
        net.layer_norm(f"{name}.post_attention_layernorm", bias=False)
        net.linear(f"{name}.mlp.gate_proj", hidden, bias=False)
        net.shape = (positions, width)
        net.linear(f"{name}.mlp.up_proj", hidden, bias=False)
        net.relu()
        net.linear(f"{name}.mlp.down_proj", width, bias=False)
    net.layer_norm("model.norm", bias=False)
    net.tied_linear(vocabulary)
    return net
