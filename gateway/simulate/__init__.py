"""The simulator: the gateway's and the engine's own objects in virtual time. The serving path never imports it."""
