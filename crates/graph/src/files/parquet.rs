//! Columns of Parquet files, read by Apache's own `parquet` crate without Arrow: plain, dictionary and delta pages,
//! uncompressed or Snappy. It is pure Rust and the format's reference implementation; a reader of our own would have to
//! follow a format that is larger than the rest of this crate.

use bytes::Bytes;
use parquet::basic::Type;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::DataType;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::EdgeColumns;
use super::npy::{Array, Numbers};

/// Values that are asked for at once.
const BATCH: usize = 1 << 16;

/// One column, as floats or integers.
enum Column {
    Ints(Vec<i64>),
    Floats(Vec<f32>),
}

impl Column {
    fn len(&self) -> usize {
        match self {
            Self::Ints(values) => values.len(),
            Self::Floats(values) => values.len(),
        }
    }
}

/// The library is written for files of honest writers: what it does not foresee in others is an error as well.
fn guarded<T>(read: impl FnOnce() -> Result<T, String> + std::panic::UnwindSafe) -> Result<T, String> {
    std::panic::catch_unwind(read).unwrap_or_else(|_| Err("is no sound Parquet file".to_owned()))
}

fn open(bytes: Bytes) -> Result<SerializedFileReader<Bytes>, String> {
    SerializedFileReader::new(bytes).map_err(|error| format!("is no Parquet file: {error}"))
}

fn num_columns(reader: &SerializedFileReader<Bytes>) -> usize {
    reader.metadata().file_metadata().schema_descr().num_columns()
}

/// The column of one of these names, else the one at `place`.
fn find(reader: &SerializedFileReader<Bytes>, names: &[&str], place: usize) -> usize {
    let schema = reader.metadata().file_metadata().schema_descr();
    let named = |column: &usize| names.contains(&schema.column(*column).name().to_ascii_lowercase().as_str());
    (0..schema.num_columns()).find(named).unwrap_or(place)
}

fn read_values<D: DataType>(
    mut reader: ColumnReaderImpl<D>,
    max_values: usize,
    push: &mut dyn FnMut(&D::T),
) -> Result<(), String> {
    let (mut values, mut levels, mut total) = (Vec::new(), Vec::new(), 0);
    loop {
        values.clear();
        levels.clear();
        let read = reader.read_records(BATCH, Some(&mut levels), None, &mut values);
        let (records, num_values, _) = read.map_err(|error| format!("cannot be decoded: {error}"))?;
        if records != num_values {
            return Err("holds a null: every edge and feature needs a value".to_owned());
        }
        if records == 0 {
            return Ok(());
        }
        total += records;
        if total > max_values {
            return Err("holds more values than it says".to_owned());
        }
        values.iter().for_each(&mut *push);
    }
}

fn read_column(reader: &SerializedFileReader<Bytes>, column: usize) -> Result<Column, String> {
    let schema = reader.metadata().file_metadata().schema_descr();
    if column >= schema.num_columns() {
        return Err(format!("has {} columns: one more is needed", schema.num_columns()));
    }
    let descriptor = schema.column(column);
    if descriptor.max_rep_level() > 0 {
        return Err(format!("column {:?} holds lists: plain numbers are read", descriptor.name()));
    }
    let (mut ints, mut floats) = (Vec::new(), Vec::new());
    for group in 0..reader.num_row_groups() {
        let failed = |error: parquet::errors::ParquetError| format!("cannot be decoded: {error}");
        let group = reader.get_row_group(group).map_err(failed)?;
        let rows =
            usize::try_from(group.metadata().num_rows()).map_err(|_| "says it has fewer than no rows")?;
        match group.get_column_reader(column).map_err(failed)? {
            ColumnReader::Int32ColumnReader(values) => {
                read_values(values, rows, &mut |value| ints.push(i64::from(*value)))?;
            }
            ColumnReader::Int64ColumnReader(values) => {
                read_values(values, rows, &mut |value| ints.push(*value))?;
            }
            ColumnReader::FloatColumnReader(values) => {
                read_values(values, rows, &mut |value| floats.push(*value))?;
            }
            ColumnReader::DoubleColumnReader(values) => {
                read_values(values, rows, &mut |value| floats.push(*value as f32))?;
            }
            _ => return Err(format!("column {:?} is not of numbers", descriptor.name())),
        }
    }
    let is_float = matches!(descriptor.physical_type(), Type::FLOAT | Type::DOUBLE);
    Ok(if is_float { Column::Floats(floats) } else { Column::Ints(ints) })
}

fn ints(column: Column) -> Result<Vec<i64>, String> {
    let len = column.len();
    let numbers = match column {
        Column::Ints(values) => Numbers::Ints(values),
        Column::Floats(values) => Numbers::Floats(values),
    };
    Array { shape: vec![len], numbers }.into_ints().map(|(_, values)| values)
}

pub fn edges(bytes: Bytes) -> Result<EdgeColumns, String> {
    guarded(move || {
        let reader = open(bytes)?;
        let sources = find(&reader, &["source", "src", "from", "row"], 0);
        let targets = find(&reader, &["target", "dst", "to", "col", "destination"], 1);
        let columns = EdgeColumns {
            sources: ints(read_column(&reader, sources)?)?,
            targets: ints(read_column(&reader, targets)?)?,
        };
        let (from, to) = (columns.sources.len(), columns.targets.len());
        if from == to { Ok(columns) } else { Err(format!("has {from} sources and {to} targets")) }
    })
}

pub fn column(bytes: Bytes) -> Result<Array, String> {
    guarded(move || {
        let reader = open(bytes)?;
        let place = find(&reader, &["node", "target", "id"], 0);
        let values = ints(read_column(&reader, place)?)?;
        Ok(Array { shape: vec![values.len()], numbers: Numbers::Ints(values) })
    })
}

/// Every column is one of the matrix.
pub fn matrix(bytes: Bytes) -> Result<Array, String> {
    guarded(move || {
        let reader = open(bytes)?;
        let cols = num_columns(&reader);
        let mut columns = Vec::with_capacity(cols.min(1 << 16));
        for column in 0..cols {
            columns.push(read_column(&reader, column)?);
        }
        let rows = columns.first().map_or(0, Column::len);
        if columns.iter().any(|column| column.len() != rows) {
            return Err("has columns of different lengths".to_owned());
        }
        let mut values = vec![0.0; rows * cols];
        for (place, column) in columns.iter().enumerate() {
            match column {
                Column::Ints(from) => (0..rows).for_each(|row| values[row * cols + place] = from[row] as f32),
                Column::Floats(from) => (0..rows).for_each(|row| values[row * cols + place] = from[row]),
            }
        }
        Ok(Array { shape: vec![rows, cols], numbers: Numbers::Floats(values) })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parquet::basic::Repetition;
    use parquet::data_type::{FloatType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::types::Type as SchemaType;

    use super::*;

    fn file(names: &[&str], columns: &[Vec<i64>], weights: Option<&[f32]>) -> Vec<u8> {
        let field = |name: &str, kind| {
            let field = SchemaType::primitive_type_builder(name, kind).with_repetition(Repetition::REQUIRED);
            Arc::new(field.build().expect("a field"))
        };
        let mut fields: Vec<_> = names.iter().map(|name| field(name, Type::INT64)).collect();
        fields.extend(weights.map(|_| field("weight", Type::FLOAT)));
        let schema =
            Arc::new(SchemaType::group_type_builder("schema").with_fields(fields).build().expect("a schema"));
        let properties =
            WriterProperties::builder().set_compression(parquet::basic::Compression::SNAPPY).build();
        let mut bytes = Vec::new();
        let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).expect("opens");
        let mut group = writer.next_row_group().expect("a group");
        for values in columns {
            let mut column = group.next_column().expect("a column").expect("there is one");
            column.typed::<Int64Type>().write_batch(values, None, None).expect("writes");
            column.close().expect("closes");
        }
        if let Some(values) = weights {
            let mut column = group.next_column().expect("a column").expect("there is one");
            column.typed::<FloatType>().write_batch(values, None, None).expect("writes");
            column.close().expect("closes");
        }
        group.close().expect("closes");
        writer.close().expect("closes");
        bytes
    }

    #[test]
    fn columns_are_found_by_name_or_place() {
        let by_place = file(&["a", "b"], &[vec![1, 2], vec![3, 4]], Some(&[0.5, 0.25]));
        let expected = EdgeColumns { sources: vec![1, 2], targets: vec![3, 4] };
        assert_eq!(edges(Bytes::from(by_place.clone())), Ok(expected.clone()));
        let by_name = file(&["dst", "src"], &[vec![3, 4], vec![1, 2]], None);
        assert_eq!(edges(Bytes::from(by_name)), Ok(expected));
        let all = matrix(Bytes::from(by_place)).expect("reads");
        assert_eq!(
            (all.shape, all.numbers),
            (vec![2, 3], Numbers::Floats(vec![1.0, 3.0, 0.5, 2.0, 4.0, 0.25]))
        );
        assert!(
            edges(Bytes::from(file(&["a"], &[vec![1]], None))).expect_err("one column").contains("1 columns")
        );
    }

    #[test]
    fn broken_files_are_errors() {
        let whole = file(&["src", "dst"], &[(0..500).collect(), (0..500).collect()], None);
        for end in (0..whole.len()).step_by(3) {
            edges(Bytes::from(whole[..end].to_vec())).expect_err("truncated");
        }
        for place in 0..whole.len() {
            let mut broken = whole.clone();
            broken[place] ^= 0xff;
            // Some bytes do not matter, none may end the program.
            let _ = edges(Bytes::from(broken));
        }
    }
}
