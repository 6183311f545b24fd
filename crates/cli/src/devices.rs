//! Devices that `baton plan` knows without having them: their memory as the driver reports it.

const MIB: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownDevice {
    pub name: &'static str,
    pub description: &'static str,
    pub memory_bytes: u64,
}

const fn gpu(name: &'static str, description: &'static str, memory_mib: u64) -> KnownDevice {
    KnownDevice { name, description, memory_bytes: memory_mib * MIB }
}

pub const DEVICES: &[KnownDevice] = &[
    gpu("b200", "NVIDIA B200", 183_359),
    gpu("h200", "NVIDIA H200", 143_771),
    gpu("h100", "NVIDIA H100 80 GB", 81_559),
    gpu("a100-80g", "NVIDIA A100 80 GB", 81_920),
    gpu("a100-40g", "NVIDIA A100 40 GB", 40_960),
    gpu("l40s", "NVIDIA L40S", 46_068),
    gpu("l4", "NVIDIA L4", 23_034),
    gpu("a10g", "NVIDIA A10G", 23_028),
    gpu("t4", "NVIDIA T4", 15_360),
    gpu("rtx5090", "NVIDIA GeForce RTX 5090", 32_607),
    gpu("rtx4090", "NVIDIA GeForce RTX 4090", 24_564),
    gpu("rtx3090", "NVIDIA GeForce RTX 3090", 24_576),
];

/// By name, whatever the case and whatever separates its parts (`RTX 4090`, `a100_80g`).
pub fn find(name: &str) -> Option<&'static KnownDevice> {
    let plain = |text: &str| {
        text.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase()
    };
    let wanted = plain(name);
    let wanted = match wanted.as_str() {
        "h10080g" | "h10080gb" => "h100",
        "a100" | "a10080gb" => "a10080g",
        "a10040gb" => "a10040g",
        other => other,
    };
    DEVICES.iter().find(|device| plain(device.name) == wanted)
}

/// All names, for messages.
pub fn names() -> String {
    DEVICES.iter().map(|device| device.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_however_they_are_written() {
        assert_eq!(find("RTX 4090").unwrap().name, "rtx4090");
        assert_eq!(find("a100").unwrap().name, "a100-80g");
        assert_eq!(find("H100-80GB").unwrap().name, "h100");
        assert_eq!(find("tpu"), None);
        for device in DEVICES {
            assert_eq!(find(device.name), Some(device));
        }
    }
}
