"""A predecessor's code injected at one depth of a causal draft that is trained together with the injector."""
