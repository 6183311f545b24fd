//! Logits to fixed-point probabilities, with an exponential of our own.
//!
//! The C library's `exp` differs between platforms in the last bit, and a GPU's differs from all of them. This one is a
//! fixed sequence of IEEE f32 additions, multiplications and one division, none of them fused: whoever repeats it gets
//! the same bits. It is also free of calls and branches, so that the compiler can use vectors.

/// The weight of the most likely token. Sums of up to 2^23 weights fit a u64.
pub const ONE: u64 = 1 << 40;

/// [`likelihood`] as a multiple of 2^-40, rounded to the nearest (even of two).
#[inline(always)]
pub fn weight(logit: f32, max: f32, temperature: f32) -> u64 {
    fixed_point(likelihood(logit, max, temperature))
}

/// `exp((logit − max) / temperature)`: how likely a token is, relative to the most likely one. 0 below exp(−28), where
/// hardly anything is left of 40 bits. `max` is finite and no smaller than `logit`.
#[inline(always)]
pub fn likelihood(logit: f32, max: f32, temperature: f32) -> f32 {
    let exponent = (clean(logit) - max) / temperature;
    // Written so that NaN (−∞ / ∞) is below.
    let is_visible = exponent > -28.0;
    let value = exp(if is_visible { exponent } else { -28.0 });
    if is_visible { value } else { 0.0 }
}

/// For 0 ≤ value ≤ 1. Adding 2^52 leaves the integer in the low bits, which vectors can do where a cast cannot.
#[inline(always)]
pub(super) fn fixed_point(value: f32) -> u64 {
    const TO_INTEGER: f64 = (1_u64 << 52) as f64;
    (f64::from(value) * ONE as f64 + TO_INTEGER).to_bits() - TO_INTEGER.to_bits()
}

/// A logit that can be compared and subtracted: no NaN, no +∞, and no −0 (which would sort below 0).
#[inline(always)]
pub(super) fn clean(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { (logit + 0.0).min(f32::MAX) }
}

/// The largest clean logit; −∞ if there is none.
#[inline(always)]
pub(super) fn largest(logits: &[f32]) -> f32 {
    // Sixteen running maxima, for vectors; a comparison with NaN is false and keeps the other.
    let mut maxima = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        for (max, logit) in maxima.iter_mut().zip(chunk) {
            *max = if *logit > *max { *logit } else { *max };
        }
    }
    clean(
        maxima
            .iter()
            .chain(rest)
            .fold(f32::NEG_INFINITY, |max, logit| if *logit > max { *logit } else { max }),
    )
}

/// For −28 ≤ x ≤ 0, within 2 · 10⁻⁷ of the value; exactly 1 at 0.
///
/// x = n · ln 2 + r with |r| ≤ ln 2 / 2, then exp(r) by its Taylor series and 2ⁿ by the exponent bits.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding 1.5 · 2^23 leaves the nearest integer in the low bits.
    const TO_INTEGER: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with so few bits that n times it is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let shifted = x * std::f32::consts::LOG2_E + TO_INTEGER;
    let n = shifted - TO_INTEGER;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut series = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        series = series * r + coefficient;
    }
    let exponent = shifted.to_bits().wrapping_sub(TO_INTEGER.to_bits()).wrapping_add(127);
    series * f32::from_bits(exponent << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        assert_eq!(exp(0.0), 1.0);
        for i in 0..=280_000 {
            let x = -(i as f32) / 10_000.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 2e-7, "exp({x}): relative error {error}");
        }
    }

    /// Bits that other implementations of this sampler must give too.
    #[test]
    fn weights_are_what_they_always_were() {
        assert_eq!(weight(3.0, 3.0, 0.7), ONE);
        assert_eq!(weight(2.0, 3.0, 1.0), 404_487_733_248);
        assert_eq!(weight(-20.0, 3.0, 1.0), 113);
        assert_eq!(weight(-25.0, 3.0, 1.0), 0);
        assert_eq!(weight(f32::NAN, 3.0, 1.0), 0);
        assert_eq!(weight(f32::NEG_INFINITY, 3.0, f32::INFINITY), 0);
        assert_eq!(weight(-3.0, 3.0, 1e-30), 0);
    }

    #[test]
    fn the_largest_of_any_length() {
        for len in 1..40 {
            for best in 0..len {
                let mut logits = vec![-1.0; len];
                logits[best] = 2.0;
                logits[(best + 1) % len] = if len > 1 { f32::NAN } else { 2.0 };
                assert_eq!(largest(&logits), 2.0);
            }
        }
        assert_eq!(largest(&[f32::NAN; 20]), f32::NEG_INFINITY);
        assert_eq!(largest(&[0.0, f32::INFINITY]), f32::MAX);
        assert!(largest(&[-0.0; 17]).is_sign_positive());
    }
}
