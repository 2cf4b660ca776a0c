package alchemist.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.util.Arrays;
import org.apache.spark.mllib.linalg.DenseVector;
import org.apache.spark.mllib.linalg.SparseVector;
import org.apache.spark.mllib.linalg.Vector;
import org.apache.spark.mllib.linalg.distributed.IndexedRow;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.SpecializedGetters;
import org.apache.spark.sql.catalyst.expressions.UnsafeArrayData;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.Platform;

/** Reads rows of Spark's internal form as elements of a matrix. */
final class Columns {
    private static final byte SPARSE = 0;

    private final String[] names;
    private final String[] types; // bool, int8, ..., float64; of the elements of vectors and lists
    private final boolean[] vectors;
    private final int[] widths; // 1: a scalar, if it is neither vector nor list
    private final boolean[] scalars;
    private final int[] ordinals; // of the columns in a batch
    private final Element element;
    private final boolean[] same; // columns whose elements are stored as those of the matrix
    private final boolean words; // all columns are 8 bytes that are the element's own

    Columns(JsonNode json, Element element) {
        int count = json.size();
        this.element = element;
        names = new String[count];
        types = new String[count];
        vectors = new boolean[count];
        scalars = new boolean[count];
        widths = new int[count];
        ordinals = new int[count];
        same = new boolean[count];
        boolean all = true;
        for (int k = 0; k < count; k++) {
            JsonNode column = json.get(k);
            names[k] = column.get("name").asText();
            types[k] = column.get("type").asText();
            vectors[k] = column.get("kind").asText().equals("vector");
            scalars[k] = column.get("kind").asText().equals("scalar");
            widths[k] = column.get("width").asInt();
            ordinals[k] = column.path("ordinal").asInt();
            same[k] = types[k].equalsIgnoreCase(element.name());
            all &= scalars[k] && same[k];
        }
        words = all && element.nbytes == 8;
    }

    int width() {
        return Arrays.stream(widths).sum();
    }

    /** The place of a column in a batch. */
    int ordinal(int k) {
        return ordinals[k];
    }

    /** The type of a column's elements. */
    String type(int k) {
        return types[k];
    }

    /** Whether a column's elements are stored as those of the matrix. */
    boolean same(int k) {
        return same[k];
    }

    /** Copy rows {@code [start, start + count)} of a batch of scalars to a block, by columns. */
    void read(ColumnarBatch batch, int start, int count, byte[] block) throws IOException {
        for (int k = 0, at = 0; k < names.length; k++, at += count * element.nbytes) {
            read(batch.column(ordinals[k]), k, start, count, block, at);
        }
    }

    /** Copy a part of a column of scalars. */
    void read(ColumnVector column, int k, int start, int count, byte[] block, int at)
            throws IOException {
        for (int j = 0; column.hasNull() && j < count; j++) {
            if (column.isNullAt(start + j)) {
                throw nulls(k);
            }
        }
        if (same(k) && element == Element.FLOAT64) {
            element.store(block, at, column.getDoubles(start, count), names[k]);
            return;
        }
        ColumnarArray values = new ColumnarArray(column, start, count);
        for (int j = 0; j < count; j++) {
            scalar(values, j, k, block, at + j * element.nbytes);
        }
    }

    /** Copy a row of Spark SQL or of MLlib to {@code at} in a block. */
    void read(Object row, byte[] block, int at) throws IOException {
        if (row instanceof InternalRow) {
            read((InternalRow) row, block, at);
            return;
        }
        Vector vector = row instanceof IndexedRow ? ((IndexedRow) row).vector() : (Vector) row;
        checkWidth(vector.size(), 0);
        if (vector instanceof DenseVector) {
            element.store(block, at, ((DenseVector) vector).values(), names[0]);
            return;
        }
        SparseVector sparse = (SparseVector) vector;
        for (int j = 0; j < widths[0]; j++) {
            element.store(block, at + j * element.nbytes, 0L, names[0]);
        }
        int[] indices = sparse.indices();
        for (int j = 0; j < indices.length; j++) {
            int place = at + indices[j] * element.nbytes;
            element.store(block, place, sparse.values()[j], names[0]);
        }
    }

    private void read(InternalRow row, byte[] block, int at) throws IOException {
        if (words && row instanceof UnsafeRow && !((UnsafeRow) row).anyNull()) {
            UnsafeRow packed = (UnsafeRow) row;
            int bits = UnsafeRow.calculateBitSetWidthInBytes(packed.numFields());
            Platform.copyMemory(
                    packed.getBaseObject(), packed.getBaseOffset() + bits,
                    block, Block.BASE + at, 8L * names.length);
            return;
        }
        for (int k = 0; k < names.length; k++) {
            if (row.isNullAt(k)) {
                throw nulls(k);
            }
            if (scalars[k]) {
                scalar(row, k, k, block, at);
            } else if (vectors[k]) {
                vector(row.getStruct(k, 4), k, block, at);
            } else {
                ArrayData list = row.getArray(k);
                checkWidth(list.numElements(), k);
                values(list, k, block, at);
            }
            at += widths[k] * element.nbytes;
        }
    }

    /** Store a field of a row, or an element of an array. */
    private void scalar(SpecializedGetters row, int field, int k, byte[] block, int at)
            throws IOException {
        switch (types[k]) {
            case "bool":
                element.store(block, at, row.getBoolean(field) ? 1L : 0L, names[k]);
                break;
            case "int8":
                element.store(block, at, (long) row.getByte(field), names[k]);
                break;
            case "int16":
                element.store(block, at, (long) row.getShort(field), names[k]);
                break;
            case "int32":
                element.store(block, at, (long) row.getInt(field), names[k]);
                break;
            case "int64":
                element.store(block, at, row.getLong(field), names[k]);
                break;
            case "float32":
                element.store(block, at, (double) row.getFloat(field), names[k]);
                break;
            default:
                element.store(block, at, row.getDouble(field), names[k]);
        }
    }

    private void vector(InternalRow vector, int k, byte[] block, int at) throws IOException {
        ArrayData values = vector.getArray(3);
        if (vector.getByte(0) != SPARSE) {
            checkWidth(values.numElements(), k);
            values(values, k, block, at);
            return;
        }
        checkWidth(vector.getInt(1), k);
        ArrayData indices = vector.getArray(2);
        for (int j = 0; j < widths[k]; j++) {
            element.store(block, at + j * element.nbytes, 0L, names[k]);
        }
        for (int j = 0; j < indices.numElements(); j++) {
            int place = at + indices.getInt(j) * element.nbytes;
            element.store(block, place, values.getDouble(j), names[k]);
        }
    }

    private void values(ArrayData list, int k, byte[] block, int at) throws IOException {
        int count = list.numElements();
        for (int j = 0; !vectors[k] && j < count; j++) {
            if (list.isNullAt(j)) {
                throw nulls(k);
            }
        }
        if (list instanceof UnsafeArrayData && same[k]) {
            UnsafeArrayData packed = (UnsafeArrayData) list;
            long start = packed.getBaseOffset()
                    + UnsafeArrayData.calculateHeaderPortionInBytes(count);
            Platform.copyMemory(
                    packed.getBaseObject(), start,
                    block, Block.BASE + at, (long) count * element.nbytes);
            return;
        }
        for (int j = 0; j < count; j++) {
            scalar(list, j, k, block, at + j * element.nbytes);
        }
    }

    private void checkWidth(int found, int k) throws IOException {
        if (found != widths[k]) {
            throw new Failure(
                    "ShapeError",
                    "column '" + names[k] + "' has a row of " + found + " elements where others "
                            + "have " + widths[k] + ": the rows of a matrix must have the same "
                            + "length");
        }
    }

    Failure nulls(int k) {
        return new Failure(
                "DtypeError",
                "column '" + names[k] + "' has nulls, which a matrix cannot represent: fill or drop "
                        + "them first (df.na.fill, df.na.drop)");
    }
}
