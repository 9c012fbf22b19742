"""Nearly-kernel predictions with every tensor written out: N² x N² inverses, dense meta kernels."""

import numpy as np


def algorithm_tensors(k, y, algorithm, step=0.0):
    """Z_A, Z_B from the N² x N² equation X (k⊗1 + 1⊗k - η k⊗k) = 1 (11.134) to (11.136)."""
    n = len(k)
    inverse, one = np.linalg.inv(k), np.eye(n)
    v = inverse @ y
    if algorithm == "direct":
        return np.zeros((n, n)), np.outer(v, v) / 2
    if algorithm == "minimum-norm":
        return np.outer(v, v), np.outer(v, v) / 2
    left = np.kron(k, one) + np.kron(one, k) - step * np.kron(k, k)
    X = np.linalg.inv(left).reshape(n, n, n, n)  # [a1 a2; a3 a4]
    Z_A = np.einsum("ac,bd->abcd", inverse, inverse) - np.einsum("be,aecd->abcd", inverse, X)
    Z_B = Z_A + step / 2 * X
    return np.einsum("abcd,c,d->ab", Z_A, y, y), np.einsum("abcd,c,d->ab", Z_B, y, y)


def prediction(k, k_b, mu_aaa, mu_baa, mu_aba, y, algorithm, step=0.0):
    """(test,) for one output: kernel prediction and the two projected terms."""
    Z_A, Z_B = algorithm_tensors(k, y, algorithm, step)
    inverse = np.linalg.inv(k)
    at_b = np.einsum("abc,ac->b", mu_aba, Z_A) + np.einsum("bac,ac->b", mu_baa, Z_B)
    at_a = np.einsum("abc,ac->b", mu_aaa, Z_A) + np.einsum("bac,ac->b", mu_aaa, Z_B)
    return k_b @ inverse @ y + at_b - k_b @ inverse @ at_a


def ridge_prediction(k, k_b, mu_aaa, mu_baa, mu_aba, y, ridge):
    """(test,) for one output, from the stationarity of the penalised loss at orders 0 and 1 in the meta kernel."""
    inverse = np.linalg.inv(k + ridge * np.eye(len(k)))
    v = inverse @ y
    bent_a, bent_b = (0.5 * np.einsum("nac,a,c->n", mu, v, v) for mu in (mu_aaa, mu_baa))
    moved_a, moved_b = (np.einsum("anc,a,c->n", mu, v, v) for mu in (mu_aaa, mu_aba))
    return k_b @ v + bent_b - k_b @ inverse @ bent_a + moved_b - k_b @ inverse @ moved_a


def random_quadratic(seed, features=24, inputs=3):
    """Feature and meta-feature functions of a small random model."""
    rng = np.random.default_rng(seed)
    A, B = rng.normal(size=(inputs, features)), rng.normal(size=(inputs, features, features)) / features**0.5

    def phi(x):
        return np.cos(x @ A)

    def psi(x):
        bent = np.sin(np.einsum("nd,dfg->nfg", x, B))
        return (bent + bent.transpose(0, 2, 1)) / 2

    return phi, psi
