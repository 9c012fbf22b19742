"""The global tangent kernel of states, P K P* (arXiv:2605.08746, arXiv:2507.06381)."""
