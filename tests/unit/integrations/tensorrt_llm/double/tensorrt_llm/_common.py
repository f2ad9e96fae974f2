# SPDX-License-Identifier: Apache-2.0
net = None


def default_net():
    assert net, "no network has been made the default"
    return net


def default_trtnet():
    return default_net().trt_network


def set_network(network):
    global net
    net = network
