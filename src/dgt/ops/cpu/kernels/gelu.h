// GELU, x times the normal distribution function at x, and its derivative.
//
// The distribution function is 1/2 + x P(x^2) / Q(x^2), with P and Q of degree 5 fitted by iteratively reweighted least
// squares until all extremes of the error were equal: 1e-8, which rounding hides. Beyond 5.6 the fraction is 1/2 to the
// last bit and stays so.
#pragma once

#include "lanes.h"

namespace dgt {

constexpr float MOST_GELU = 5.6f;

// The distribution function at x, minus 1/2.
DGT_INLINE Floats normal_distribution(Floats x) {
    Floats y = smaller(all(MOST_GELU), larger(all(-MOST_GELU), x));  // NaN stays NaN
    Floats square = y * y;
    Floats above = all(2.214529059e-08f);
    above = above * square + 6.356534392e-06f;
    above = above * square + 1.738510954e-04f;
    above = above * square + 4.707261721e-03f;
    above = above * square + 3.437614201e-02f;
    above = above * square + 3.989422216e-01f;
    Floats below = all(1.180211498e-06f);
    below = below * square + 7.510203825e-05f;
    below = below * square + 1.912980298e-03f;
    below = below * square + 2.894010812e-02f;
    below = below * square + 2.528339226e-01f;
    below = below * square + 1.0f;
    return smaller(all(0.5f), larger(all(-0.5f), y * above * reciprocal(below)));
}

DGT_INLINE Floats gelu(Floats x) { return x * normal_distribution(x) + x * 0.5f; }

// GELU and its derivative: the distribution function, and x times the density of the normal distribution.
struct GeluSlope {
    Floats value;
    Floats slope;
};

DGT_INLINE GeluSlope gelu_with_slope(Floats x) {
    Floats share = normal_distribution(x) + 0.5f;
    Floats density = power_of_two(x * x * -0.7213475204f) * 0.3989422804f;  // exp(-x^2 / 2) / sqrt(2 pi)
    return {x * share, share + x * density};
}

}  // namespace dgt
