//! The alphabet of byte-level BPE: GPT-2 writes each of the 256 bytes as one printable character.
//!
//! Printable Latin-1 stands for itself; the other 68 bytes take the characters from U+0100 on, in order. Vocabulary
//! files hold tokens in this alphabet; everything past loading works on real bytes.

/// Tables in both directions.
#[derive(Debug)]
pub(crate) struct ByteAlphabet {
    to_char: [char; 256],
    /// Indexed by code point; the alphabet ends at U+0143.
    to_byte: [Option<u8>; 0x144],
}

fn stands_for_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

impl ByteAlphabet {
    pub(crate) const fn table_len() -> usize {
        0x144
    }

    pub(crate) fn new() -> Self {
        let mut to_char = ['\0'; 256];
        let mut to_byte = [None; Self::table_len()];
        let mut next = 0x100u32;
        for byte in 0..=255u8 {
            let code = if stands_for_itself(byte) {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            to_char[byte as usize] = char::from_u32(code).expect("code points below 0x144 are characters");
            to_byte[code as usize] = Some(byte);
        }
        Self { to_char, to_byte }
    }

    pub(crate) fn char_of(&self, byte: u8) -> char {
        self.to_char[byte as usize]
    }

    /// The bytes that a token of a vocabulary file stands for. A character outside the alphabet (some files hold
    /// added tokens in plain text) stands for its own UTF-8.
    pub(crate) fn decode_into(&self, token: &str, out: &mut Vec<u8>) {
        for character in token.chars() {
            match self.to_byte.get(character as usize).copied().flatten() {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
    }

    /// As [`Self::decode_into`], but `None` when a character is outside the alphabet.
    pub(crate) fn decode_exact(&self, token: &str) -> Option<Vec<u8>> {
        token.chars().map(|character| self.to_byte.get(character as usize).copied().flatten()).collect()
    }
}

/// The byte of a SentencePiece byte token, written `<0x0A>`.
pub(crate) fn byte_of_hex_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        u8::from_str_radix(hex, 16).ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        let alphabet = ByteAlphabet::new();
        for byte in 0..=255u8 {
            let text = alphabet.char_of(byte).to_string();
            assert_eq!(alphabet.decode_exact(&text), Some(vec![byte]));
        }
        assert_eq!(alphabet.char_of(b' '), 'Ġ');
        assert_eq!(alphabet.char_of(b'\n'), 'Ċ');
        assert_eq!(alphabet.char_of(0xAD), 'Ń');
    }

    #[test]
    fn hex_tokens() {
        assert_eq!(byte_of_hex_token("<0x0A>"), Some(10));
        assert_eq!(byte_of_hex_token("<0xff>"), Some(255));
        assert_eq!(byte_of_hex_token("<0x+A>"), None);
        assert_eq!(byte_of_hex_token("<0x0AB>"), None);
        assert_eq!(byte_of_hex_token("0x0A"), None);
    }
}
