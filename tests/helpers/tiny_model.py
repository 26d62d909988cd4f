"""A model of one layer, for tests of arguments, which hardly decode."""

from mtpjax import ModelConfig, MTPModel

MODEL = MTPModel(
    ModelConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        num_mtp_modules=1,
    )
)
