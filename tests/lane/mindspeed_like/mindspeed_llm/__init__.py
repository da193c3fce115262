from mindspeed_llm.tasks import megatron_adaptor_v2 as megatron_adaptor  # noqa: F401
