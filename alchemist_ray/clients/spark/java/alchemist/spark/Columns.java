package alchemist.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.mllib.linalg.DenseVector;
import org.apache.spark.mllib.linalg.SparseVector;
import org.apache.spark.mllib.linalg.Vector;
import org.apache.spark.mllib.linalg.distributed.IndexedRow;
import org.apache.spark.sql.catalyst.InternalRow;
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

    final List<Column> all = new ArrayList<>();
    private final Element element; // of the matrix
    private final boolean words; // all columns are 8 bytes that are the element's own

    Columns(JsonNode json, Element element) {
        this.element = element;
        json.forEach(column -> all.add(new Column(column)));
        words = element.nbytes == 8
                && all.stream().allMatch(column -> column.scalar && column.same);
    }

    int width() {
        return all.stream().mapToInt(column -> column.width).sum();
    }

    /** Copy rows {@code [start, start + count)} of a batch of scalars to a block, by columns. */
    void read(ColumnarBatch batch, int start, int count, byte[] block) throws IOException {
        int at = 0;
        for (Column column : all) {
            column.read(batch.column(column.ordinal), start, count, block, at);
            at += count * element.nbytes;
        }
    }

    /** Copy a row of Spark SQL or of MLlib to {@code at} in a block. */
    void read(Object row, byte[] block, int at) throws IOException {
        if (row instanceof InternalRow) {
            read((InternalRow) row, block, at);
            return;
        }
        Column column = all.get(0);
        Vector vector = row instanceof IndexedRow ? ((IndexedRow) row).vector() : (Vector) row;
        column.checkWidth(vector.size());
        if (vector instanceof DenseVector) {
            element.store(block, at, ((DenseVector) vector).values(), column.name);
            return;
        }
        SparseVector sparse = (SparseVector) vector;
        int[] indices = sparse.indices();
        column.zero(block, at);
        for (int j = 0; j < indices.length; j++) {
            int place = at + indices[j] * element.nbytes;
            element.store(block, place, sparse.values()[j], column.name);
        }
    }

    private void read(InternalRow row, byte[] block, int at) throws IOException {
        if (words && row instanceof UnsafeRow && !((UnsafeRow) row).anyNull()) {
            UnsafeRow packed = (UnsafeRow) row;
            int bits = UnsafeRow.calculateBitSetWidthInBytes(packed.numFields());
            Platform.copyMemory(
                    packed.getBaseObject(), packed.getBaseOffset() + bits,
                    block, Block.BASE + at, 8L * all.size());
            return;
        }
        for (int k = 0; k < all.size(); k++) {
            Column column = all.get(k);
            column.read(row, k, block, at);
            at += column.width * element.nbytes;
        }
    }

    /** A column of Spark, and its elements in a row of the matrix. */
    final class Column {
        final String name;
        final Element from; // of vectors and lists, their elements
        final int ordinal; // in a batch
        final boolean same; // its elements are stored as those of the matrix
        private final boolean scalar, vector; // a list if neither
        private final int width;

        private Column(JsonNode json) {
            name = json.get("name").asText();
            from = Element.of(json.get("type").asText());
            scalar = json.get("kind").asText().equals("scalar");
            vector = json.get("kind").asText().equals("vector");
            width = json.get("width").asInt();
            ordinal = json.path("ordinal").asInt();
            same = from == element;
        }

        /** Copy a part of a column of scalars. */
        void read(ColumnVector column, int start, int count, byte[] block, int at)
                throws IOException {
            for (int j = 0; column.hasNull() && j < count; j++) {
                if (column.isNullAt(start + j)) {
                    throw nulls();
                }
            }
            if (same && element == Element.FLOAT64) {
                element.store(block, at, column.getDoubles(start, count), name);
                return;
            }
            ColumnarArray values = new ColumnarArray(column, start, count);
            for (int j = 0; j < count; j++) {
                element.store(block, at + j * element.nbytes, values, j, from, name);
            }
        }

        private void read(InternalRow row, int field, byte[] block, int at) throws IOException {
            if (row.isNullAt(field)) {
                throw nulls();
            }
            if (scalar) {
                element.store(block, at, row, field, from, name);
            } else if (vector) {
                vector(row.getStruct(field, 4), block, at);
            } else {
                ArrayData list = row.getArray(field);
                for (int j = 0; j < list.numElements(); j++) {
                    if (list.isNullAt(j)) {
                        throw nulls();
                    }
                }
                values(list, block, at);
            }
        }

        private void vector(InternalRow vector, byte[] block, int at) throws IOException {
            ArrayData values = vector.getArray(3);
            if (vector.getByte(0) != SPARSE) {
                values(values, block, at);
                return;
            }
            checkWidth(vector.getInt(1));
            ArrayData indices = vector.getArray(2);
            zero(block, at);
            for (int j = 0; j < indices.numElements(); j++) {
                int place = at + indices.getInt(j) * element.nbytes;
                element.store(block, place, values.getDouble(j), name);
            }
        }

        private void values(ArrayData list, byte[] block, int at) throws IOException {
            int count = list.numElements();
            checkWidth(count);
            if (list instanceof UnsafeArrayData && same) {
                UnsafeArrayData packed = (UnsafeArrayData) list;
                long start = packed.getBaseOffset()
                        + UnsafeArrayData.calculateHeaderPortionInBytes(count);
                Platform.copyMemory(
                        packed.getBaseObject(), start,
                        block, Block.BASE + at, (long) count * element.nbytes);
                return;
            }
            for (int j = 0; j < count; j++) {
                element.store(block, at + j * element.nbytes, list, j, from, name);
            }
        }

        private void zero(byte[] block, int at) {
            Arrays.fill(block, at, at + width * element.nbytes, (byte) 0);
        }

        private void checkWidth(int found) throws IOException {
            if (found != width) {
                throw new Failure(
                        "ShapeError",
                        "column '" + name + "' has a row of " + found + " elements where others "
                                + "have " + width + ": the rows of a matrix must have the same "
                                + "length");
            }
        }

        Failure nulls() {
            return new Failure(
                    "DtypeError",
                    "column '" + name + "' has nulls, which a matrix cannot represent: fill or "
                            + "drop them first (df.na.fill, df.na.drop)");
        }
    }
}
