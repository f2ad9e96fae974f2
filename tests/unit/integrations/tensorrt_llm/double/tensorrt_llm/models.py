# SPDX-License-Identifier: Apache-2.0
import copy
import json

from .mapping import Mapping
from .module import Module
from .plugin import init_all_reduce_helper

MODEL_MAP = {}


class QuantConfig:
    def __init__(self, quant_algo=None, kv_cache_quant_algo=None):
        self.quant_algo = quant_algo
        self.kv_cache_quant_algo = kv_cache_quant_algo

    @classmethod
    def from_dict(cls, data):
        return cls(**data)

    def to_dict(self):
        return dict(self.__dict__)


class PretrainedConfig:
    def __init__(
        self,
        *,
        architecture,
        dtype,
        hidden_size,
        num_hidden_layers,
        num_attention_heads,
        mapping=None,
        quantization=None,
        **kwargs,
    ):
        self.architecture = architecture
        self.dtype = dtype
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.mapping = mapping if isinstance(mapping, Mapping) else Mapping.from_dict(mapping or {})
        self.quantization = QuantConfig.from_dict(quantization or {})
        for key, value in kwargs.items():
            setattr(self, key, value)

    @classmethod
    def from_dict(cls, config):
        model_class = MODEL_MAP[config["architecture"]]
        return getattr(model_class, "config_class", cls)(**config)

    @classmethod
    def from_json_file(cls, config_file):
        with open(config_file) as file:
            return cls.from_dict(json.load(file))

    def to_dict(self):
        content = copy.deepcopy(self.__dict__)
        content["mapping"] = self.mapping.to_dict()
        content["mapping"].pop("rank")
        content["quantization"] = self.quantization.to_dict()
        return content

    def set_rank(self, rank):
        self.mapping.rank = rank


class PretrainedModel(Module):
    def __init__(self, config):
        super().__init__()
        init_all_reduce_helper()
        self.config = config

    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None, *, preprocess_weights_hook=None):
        raise NotImplementedError

    def prepare_inputs(self, max_batch_size, max_input_len, max_seq_len, max_num_tokens, use_cache):
        raise NotImplementedError
