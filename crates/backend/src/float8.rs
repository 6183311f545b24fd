//! The eight-bit floating-point number e4m3 (one sign, four bits of exponent, three of mantissa; no infinities), in which a KV
//! cache may be stored. Largest value 448, smallest 2⁻⁹. Conversions are those of the GPU instructions: to the nearest, ties to
//! even, and what is too large becomes the largest.

const EXPONENT_BIAS: i32 = 7;
const MANTISSA_BITS: u32 = 3;
/// Below this exponent the spacing of values stays the same.
const MIN_EXPONENT: i32 = 1 - EXPONENT_BIAS;
const LARGEST: f32 = 448.0;
const NAN: u8 = 0x7f;

/// The code of the nearest value.
pub fn e4m3_from_f32(value: f32) -> u8 {
    let sign = u8::from(value.is_sign_negative()) << 7;
    let magnitude = value.abs();
    if value.is_nan() {
        return sign | NAN;
    }
    let exponent = (((magnitude.to_bits() >> 23) as i32) - 127).max(MIN_EXPONENT);
    // In units of the last bit, which a power of two makes exact.
    let units = magnitude.min(LARGEST) * 2.0_f32.powi(MANTISSA_BITS as i32 - exponent.min(8));
    // Rounding up to the next power of two carries into the exponent by itself.
    let above_subnormal = (exponent.min(8) - MIN_EXPONENT) as u32;
    let code = (above_subnormal << MANTISSA_BITS) + units.round_ties_even() as u32;
    sign | code as u8
}

/// The value of a code.
pub fn e4m3_to_f32(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(code >> MANTISSA_BITS & 15), f32::from(code & 7));
    match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa * 2.0_f32.powi(MIN_EXPONENT - MANTISSA_BITS as i32),
        _ => sign * (8.0 + mantissa) * 2.0_f32.powi(exponent - EXPONENT_BIAS - MANTISSA_BITS as i32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_its_own_nearest() {
        for code in 0..=u8::MAX {
            let value = e4m3_to_f32(code);
            assert_eq!(value.is_nan(), code & 0x7f == NAN, "{code:#x}");
            if !value.is_nan() {
                assert_eq!(e4m3_from_f32(value), code, "{value}");
            }
        }
        assert_eq!([0x38, 0x7e, 1, 0xb9].map(e4m3_to_f32), [1.0, 448.0, 2.0_f32.powi(-9), -1.125]);
        assert_eq!(e4m3_from_f32(f32::NAN) & 0x7f, NAN);
    }

    #[test]
    fn values_between_go_to_the_nearest_and_ties_to_even() {
        for code in 0..0x7e_u8 {
            let (low, high) = (e4m3_to_f32(code), e4m3_to_f32(code + 1));
            let middle = f32::midpoint(low, high);
            let even = if code % 2 == 0 { code } else { code + 1 };
            assert_eq!(e4m3_from_f32(middle), even, "{middle}");
            assert_eq!(e4m3_from_f32(middle.next_down()), code, "just below {middle}");
            assert_eq!(e4m3_from_f32(middle.next_up()), code + 1, "just above {middle}");
            assert_eq!(e4m3_from_f32(-middle), even | 0x80);
        }
    }

    #[test]
    fn what_is_too_large_becomes_the_largest() {
        for value in [448.0, 449.0, 480.0, 1e6, f32::MAX, f32::INFINITY] {
            assert_eq!((e4m3_from_f32(value), e4m3_from_f32(-value)), (0x7e, 0xfe), "{value}");
        }
        for value in [0.0, 1e-10, f32::MIN_POSITIVE, 2.0_f32.powi(-10)] {
            assert_eq!((e4m3_from_f32(value), e4m3_from_f32(-value)), (0, 0x80), "{value}");
        }
    }
}
