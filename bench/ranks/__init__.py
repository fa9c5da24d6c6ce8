"""Several ranks: tensor parallelism, pipelines, forecasts for several GPUs."""
