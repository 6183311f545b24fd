//! A checked reader over the bytes of a GGUF file. It never reads past the end, and every error gives its position.

/// Why parsing stopped; becomes the cause of `ModelError::Malformed`.
pub(super) type Parsed<T> = Result<T, String>;

#[derive(Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// The next `len` bytes. `what` names them in the error.
    pub(super) fn take(&mut self, len: u64, what: &str) -> Parsed<&'a [u8]> {
        let remaining = self.remaining();
        let Some(len) = usize::try_from(len).ok().filter(|&len| len <= remaining) else {
            return Err(format!(
                "{what} at byte {} needs {len} bytes but only {remaining} are left; the file is damaged or incomplete",
                self.position
            ));
        };
        let taken = &self.bytes[self.position..self.position + len];
        self.position += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Parsed<[u8; N]> {
        let bytes = self.take(N as u64, what)?;
        Ok(bytes.try_into().expect("take gives the length asked for"))
    }

    pub(super) fn read_u8(&mut self, what: &str) -> Parsed<u8> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(super) fn read_i8(&mut self, what: &str) -> Parsed<i8> {
        self.array(what).map(i8::from_le_bytes)
    }

    pub(super) fn read_u16(&mut self, what: &str) -> Parsed<u16> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub(super) fn read_i16(&mut self, what: &str) -> Parsed<i16> {
        self.array(what).map(i16::from_le_bytes)
    }

    pub(super) fn read_u32(&mut self, what: &str) -> Parsed<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn read_i32(&mut self, what: &str) -> Parsed<i32> {
        self.array(what).map(i32::from_le_bytes)
    }

    pub(super) fn read_f32(&mut self, what: &str) -> Parsed<f32> {
        self.array(what).map(f32::from_le_bytes)
    }

    pub(super) fn read_u64(&mut self, what: &str) -> Parsed<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    pub(super) fn read_i64(&mut self, what: &str) -> Parsed<i64> {
        self.array(what).map(i64::from_le_bytes)
    }

    pub(super) fn read_f64(&mut self, what: &str) -> Parsed<f64> {
        self.array(what).map(f64::from_le_bytes)
    }

    pub(super) fn read_bool(&mut self, what: &str) -> Parsed<bool> {
        let position = self.position;
        match self.read_u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            other => {
                Err(format!("{what} at byte {position} is {other}, which is neither false (0) nor true (1)"))
            }
        }
    }

    /// A length (u64) and that many bytes of UTF-8.
    pub(super) fn read_string(&mut self, what: &str) -> Parsed<String> {
        let position = self.position;
        let len = self.read_u64(what)?;
        let bytes = self.take(len, what)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(cause) => Err(format!("{what} at byte {position} is not UTF-8: {cause}")),
        }
    }
}
