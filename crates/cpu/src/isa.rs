//! Which instruction set the kernels use: found at run time, or forced for tests and bug reports.
//!
//! Only the choice is made here; the kernels themselves are in [`crate::kernels`].

use std::fmt;
use std::str::FromStr;

use baton_backend::BackendError;

/// Names the environment variable that forces a path.
pub const ISA_VARIABLE: &str = "BATON_CPU_ISA";

/// A family of instructions that one set of kernels is built for, from the plainest to the richest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the compiler makes of plain loops; on every machine.
    Portable,
    /// 64-bit Arm with the 8-bit dot products of ARMv8.2.
    Neon,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same with the 8-bit dot products of VNNI.
    Avx512Vnni,
    /// The same with dot products of bf16, for attention over 16-bit caches.
    Avx512Bf16,
    /// VNNI with AMX tiles for bf16 weights.
    AmxBf16,
    /// The same with tiles for k-quants as well, whose activations are then quantised in super-blocks.
    Amx,
}

impl Isa {
    pub const ALL: [Self; 8] = [
        Self::Portable,
        Self::Neon,
        Self::Avx2,
        Self::Avx512,
        Self::Avx512Vnni,
        Self::Avx512Bf16,
        Self::AmxBf16,
        Self::Amx,
    ];

    /// True where this processor can run the path.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        let avx2 = || {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        };
        let avx512 = || {
            avx2()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        };
        match self {
            Self::Portable => true,
            Self::Neon => false,
            Self::Avx2 => avx2(),
            Self::Avx512 => avx512(),
            Self::Avx512Vnni => avx512() && is_x86_feature_detected!("avx512vnni"),
            Self::Avx512Bf16 => Self::Avx512Vnni.is_available() && is_x86_feature_detected!("avx512bf16"),
            Self::AmxBf16 | Self::Amx => {
                Self::Avx512Vnni.is_available() && crate::kernels::amx::is_available()
            }
        }
    }

    /// True where this processor can run the path.
    #[cfg(target_arch = "aarch64")]
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => std::arch::is_aarch64_feature_detected!("dotprod"),
            _ => false,
        }
    }

    /// True where this processor can run the path.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn is_available(self) -> bool {
        self == Self::Portable
    }

    /// The richest path of this processor that is taken unasked. Tiles for k-quants are not: they round activations more coarsely.
    pub fn best() -> Self {
        let unasked = |isa: &Self| *isa < Self::Amx && isa.is_available();
        Self::ALL.into_iter().rev().find(unasked).unwrap_or(Self::Portable)
    }

    /// What was asked for, else the environment's choice, else the best. An unavailable path is an error.
    pub fn choose(forced: Option<Self>) -> Result<Self, BackendError> {
        let forced = match (forced, std::env::var(ISA_VARIABLE)) {
            (Some(isa), _) => Some(isa),
            (None, Ok(name)) if !name.is_empty() => Some(name.parse()?),
            _ => None,
        };
        match forced {
            None => Ok(Self::best()),
            Some(isa) if isa.is_available() => Ok(isa),
            Some(isa) => Err(BackendError::Unsupported { what: format!("{isa} instructions") }),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512-vnni",
            Self::Avx512Bf16 => "avx512-bf16",
            Self::AmxBf16 => "amx-bf16",
            Self::Amx => "amx",
        })
    }
}

impl FromStr for Isa {
    type Err = BackendError;

    fn from_str(name: &str) -> Result<Self, BackendError> {
        match name.to_ascii_lowercase().as_str() {
            "portable" => Ok(Self::Portable),
            "neon" => Ok(Self::Neon),
            "avx2" => Ok(Self::Avx2),
            "avx512" => Ok(Self::Avx512),
            "avx512vnni" | "avx512-vnni" => Ok(Self::Avx512Vnni),
            "avx512bf16" | "avx512-bf16" => Ok(Self::Avx512Bf16),
            "amxbf16" | "amx-bf16" => Ok(Self::AmxBf16),
            "amx" => Ok(Self::Amx),
            _ => Err(BackendError::Unsupported {
                what: format!(
                    "{ISA_VARIABLE}={name}: use portable, neon, avx2, avx512, avx512vnni, avx512bf16, amxbf16 or amx"
                ),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_wrong_ones_are_refused() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse::<Isa>().expect("own name"), isa);
        }
        assert!("avx9".parse::<Isa>().is_err());
        assert!(Isa::Portable.is_available());
        assert!(Isa::best().is_available());
    }
}
