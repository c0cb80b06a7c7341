"""A report small enough for tests: every section, seconds."""

from subquad.lab.report import Settings

TINY = Settings(
    seconds=600.0,  # a busy machine must not make tests fail
    lengths=(32, 64),
    longest_training=32,
    mechanisms=("performer", "linear", "taylor", "local"),
    heads=2,
    head_dim=16,
    runs=2,
    memory_lengths=(64,),
    contexts=(32, 128),
    error_features=(16, 64),
    error_draws=1,
    error_data=("d16-0.5", "d16-1.5"),
    published_features=(16, 64),
    projection_features=20,
    projection_dims=(16,),
    spectrum_lengths=(32, 64),
    recommend_steps=2,
    recommend_draws=1,
    shipped_step=3,
    published_draws=2,
    recommend_tokens=128,
)
