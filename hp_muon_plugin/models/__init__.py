"""megatron-core model builders."""
