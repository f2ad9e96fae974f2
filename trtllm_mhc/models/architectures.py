# SPDX-License-Identifier: Apache-2.0
"""Names of model architectures, as checkpoints' ``config.json`` has them."""

DEEPSEEK_V41 = "DeepseekV41ForCausalLM"
