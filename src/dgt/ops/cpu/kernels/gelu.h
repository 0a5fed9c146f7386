// GELU, x times the normal distribution function at x, and its derivative.
#pragma once

#include "lanes.h"

namespace dgt {

// The distribution function, minus 1/2, and its derivative, the density.
struct Normal {
    Floats distribution;
    Floats density;
};

#if defined(DGT_AVX512)

// Taylor polynomials of degree 4 around 32 centers, from 0 on, the last of which is 1/2: the distribution function is
// there to the last bit. They miss it by at most 7e-8, and the density by 4e-6, where they are least exact, 3/32 from a
// center. Two registers hold a coefficient of all polynomials, and one instruction finds it, which takes less time than
// a fraction for all numbers.
constexpr int POLYNOMIALS = 32;
constexpr int DEGREE = 4;
constexpr double CENTERS_APART = 3.0 / 16;
constexpr float MOST_GELU = (float)((POLYNOMIALS - 1) * CENTERS_APART);

struct TaylorPolynomials {
    alignas(64) float of[DEGREE + 1][POLYNOMIALS];
};

constexpr TaylorPolynomials expand_normal_distribution() {
    TaylorPolynomials polynomials{};
    for (int i = 0; i < POLYNOMIALS - 1; ++i) {
        double x = i * CENTERS_APART;
        // exp(x^2 / 2) = sum of x^(2n) / (2 * 4 ... 2n); the integral of the density is the density times the sum of
        // x^(2n + 1) / (1 * 3 ... (2n + 1)).
        double exponential = 1, power = 1, integral = x, odd_power = x;
        for (int n = 1; n < 100; ++n) {
            power *= x * x / (2 * n);
            exponential += power;
            odd_power *= x * x / (2 * n + 1);
            integral += odd_power;
        }
        double density = 0.39894228040143268 / exponential;
        polynomials.of[0][i] = (float)(density * integral);
        polynomials.of[1][i] = (float)density;
        polynomials.of[2][i] = (float)(-density * x / 2);
        polynomials.of[3][i] = (float)(density * (x * x - 1) / 6);
        polynomials.of[4][i] = (float)(density * x * (3 - x * x) / 24);
    }
    polynomials.of[0][POLYNOMIALS - 1] = 0.5f;
    return polynomials;
}

constexpr TaylorPolynomials NORMAL_DISTRIBUTION = expand_normal_distribution();

DGT_INLINE Floats coefficient(int power, Words polynomial) {
    const float* values = NORMAL_DISTRIBUTION.of[power];
    return _mm512_permutex2var_ps(load(values), (__m512i)polynomial, load(values + W));
}

DGT_INLINE Normal normal(Floats x) {
    Words sign = (Words)x & 0x80000000u;
    Floats y = smaller(all(MOST_GELU), (Floats)((Words)x ^ sign));  // NaN stays NaN
    Floats shifted = y * (float)(1 / CENTERS_APART) + 12582912.0f;  // 1.5 * 2^23: rounds, as in `power_of_two`
    Floats rest = y - (shifted - 12582912.0f) * (float)CENTERS_APART;
    Words polynomial = (Words)shifted;  // its low five bits
    Floats sum = coefficient(DEGREE, polynomial);
    Floats derivative = Floats{};
#pragma GCC unroll 4
    for (int power = DEGREE - 1; power >= 0; --power) {
        derivative = derivative * rest + sum;
        sum = sum * rest + coefficient(power, polynomial);
    }
    return {(Floats)((Words)sum ^ sign), derivative};
}

#endif

// The density of the normal distribution at x, exp(-x^2 / 2) / sqrt(2 pi), to the last bits of float32.
DGT_INLINE Floats normal_density(Floats x) { return power_of_two(x * x * -0.7213475204f) * 0.3989422804f; }

#if !defined(DGT_AVX512)

// It is 1/2 + x P(x^2) / Q(x^2), with P and Q of degree 5 fitted by iteratively reweighted least squares until all
// extremes of the error were equal: 1e-8, which rounding hides. Beyond 5.6 the fraction is 1/2 to the last bit and
// stays so.
constexpr float MOST_GELU = 5.6f;

DGT_INLINE Normal normal(Floats x) {
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
    return {smaller(all(0.5f), larger(all(-0.5f), y * above * reciprocal(below))), normal_density(x)};
}

#endif

DGT_INLINE Floats gelu(Floats x) { return x * normal(x).distribution + x * 0.5f; }

// GELU and its derivative: the distribution function, and x times the density.
struct GeluSlope {
    Floats value;
    Floats slope;
};

// For elements of type T: what 16 bits round away is not computed.
template <class T>
DGT_INLINE GeluSlope gelu_with_slope(Floats x) {
    Normal found = normal(x);
    Floats share = found.distribution + 0.5f;
    Floats density = sizeof(T) == sizeof(float) ? normal_density(x) : found.density;
    return {x * share, share + x * density};
}

}  // namespace dgt
