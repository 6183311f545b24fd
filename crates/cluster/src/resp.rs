//! As much of RESP2, the protocol of Redis, as a store of large values needs.
//!
//! Our own and not a client library: values go straight from the socket into the buffer that is checked, nothing is allocated
//! by what a server says, and every wait has a deadline, none of which the usual clients offer.

use std::io::{self, BufRead, Write};

/// A line of a reply is never longer than this.
const MAX_LINE: usize = 4096;

/// How a reply begins. After [`Reply::Bulk`] so many bytes and a line end follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Simple(String),
    Error(String),
    Integer(i64),
    Bulk(usize),
    /// No such value.
    Null,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not a reply of Redis: {what}"))
}

/// Reads how the next reply begins.
pub fn read_reply(reader: &mut impl BufRead) -> io::Result<Reply> {
    let line = read_line(reader)?;
    let (kind, rest) = line.split_at_checked(1).ok_or_else(|| broken("an empty line"))?;
    let number = || rest.parse::<i64>().map_err(|_| broken("not a number"));
    match kind {
        "+" => Ok(Reply::Simple(rest.to_owned())),
        "-" => Ok(Reply::Error(rest.to_owned())),
        ":" => number().map(Reply::Integer),
        "$" => match number()? {
            -1 => Ok(Reply::Null),
            len => usize::try_from(len).map(Reply::Bulk).map_err(|_| broken("a negative length")),
        },
        _ => Err(broken("an unknown kind")),
    }
}

/// Reads the bytes of a [`Reply::Bulk`], which must fill `value`.
pub fn read_bulk(reader: &mut impl BufRead, value: &mut [u8]) -> io::Result<()> {
    reader.read_exact(value)?;
    let mut end = [0; 2];
    reader.read_exact(&mut end)?;
    if end == *b"\r\n" { Ok(()) } else { Err(broken("a value without an end")) }
}

fn read_line(reader: &mut impl BufRead) -> io::Result<String> {
    let mut line = Vec::new();
    loop {
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(buffer.len(), |end| end + 1);
        line.extend_from_slice(&buffer[..taken]);
        reader.consume(taken);
        if line.len() > MAX_LINE {
            return Err(broken("a line that is too long"));
        }
        if end.is_some() {
            break;
        }
    }
    let line = line.strip_suffix(b"\r\n").ok_or_else(|| broken("a line without its end"))?;
    String::from_utf8(line.to_vec()).map_err(|_| broken("not UTF-8"))
}

/// Writes how a command of so many arguments begins.
pub fn write_array(writer: &mut impl Write, len: usize) -> io::Result<()> {
    write!(writer, "*{len}\r\n")
}

/// Writes an argument that may be in several parts.
pub fn write_bulk(writer: &mut impl Write, parts: &[&[u8]]) -> io::Result<()> {
    write!(writer, "${}\r\n", parts.iter().map(|part| part.len()).sum::<usize>())?;
    for part in parts {
        writer.write_all(part)?;
    }
    writer.write_all(b"\r\n")
}

/// Writes a whole command.
pub fn write_command(writer: &mut impl Write, arguments: &[&str]) -> io::Result<()> {
    write_array(writer, arguments.len())?;
    arguments.iter().try_for_each(|argument| write_bulk(writer, &[argument.as_bytes()]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read_one_after_another() {
        let mut bytes: &[u8] = b"+OK\r\n:12\r\n$3\r\na\r\n\r\n$-1\r\n-ERR no\r\n";
        assert_eq!(read_reply(&mut bytes).unwrap(), Reply::Simple("OK".to_owned()));
        assert_eq!(read_reply(&mut bytes).unwrap(), Reply::Integer(12));
        assert_eq!(read_reply(&mut bytes).unwrap(), Reply::Bulk(3));
        let mut value = [0; 3];
        read_bulk(&mut bytes, &mut value).unwrap();
        assert_eq!(&value, b"a\r\n");
        assert_eq!(read_reply(&mut bytes).unwrap(), Reply::Null);
        assert_eq!(read_reply(&mut bytes).unwrap(), Reply::Error("ERR no".to_owned()));
        assert!(read_reply(&mut bytes).is_err());
    }

    #[test]
    fn garbage_is_an_error() {
        let long = [b'+'; 2 * MAX_LINE];
        let cases: [&[u8]; 7] = [b"", b"\r\n", b"?1\r\n", b":x\r\n", b"$-2\r\n", b"+half", &long];
        for case in cases {
            assert!(read_reply(&mut &*case).is_err(), "{case:?}");
        }
    }

    #[test]
    fn commands_are_arrays_of_strings() {
        let mut written = Vec::new();
        write_command(&mut written, &["GET", "k"]).unwrap();
        assert_eq!(written, b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n");
    }
}
