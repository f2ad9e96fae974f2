# SPDX-License-Identifier: Apache-2.0
class Mapping:
    def __init__(self, world_size=1, rank=0, *, tp_size=-1, pp_size=-1):
        self.world_size = world_size
        self.rank = rank
        self.pp_size = max(pp_size, 1)
        self.tp_size = tp_size if tp_size > 0 else world_size // self.pp_size

    @classmethod
    def from_dict(cls, mapping):
        return cls(**mapping)

    def to_dict(self):
        return {"world_size": self.world_size, "rank": self.rank, "tp_size": self.tp_size, "pp_size": self.pp_size}

    @property
    def tp_rank(self):
        return self.rank % self.tp_size

    @property
    def tp_group(self):
        first = self.rank - self.tp_rank
        return list(range(first, first + self.tp_size))
