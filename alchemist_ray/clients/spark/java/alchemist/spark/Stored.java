package alchemist.spark;

import java.io.IOException;
import org.apache.spark.sql.execution.columnar.ColumnAccessor$;
import org.apache.spark.sql.execution.columnar.DefaultCachedBatch;
import org.apache.spark.sql.execution.columnar.compression.PassThrough$;
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.unsafe.Platform;

/**
 * Batches of Spark's cache, sent from where they are stored.
 *
 * <p>For each column the cache has the number of its nulls and their places, the number of an
 * encoding, and the encoded values, in the byte order of the machine. Values that are neither encoded
 * nor to be converted are sent as they are; Spark decodes others.
 */
final class Stored {
    private static final int HEADER_BYTES = 8; // without nulls

    private final Columns columns;
    private final Element element;
    private final Block block;
    private final byte[][] decoded; // reused
    private final byte[][] values; // of a batch
    private final int[] first; // the place of each column's first element
    private long direct; // columns of batches that were not decoded

    Stored(Columns columns, Element element, Block block) {
        this.columns = columns;
        this.element = element;
        this.block = block;
        decoded = new byte[columns.width()][];
        values = new byte[columns.width()][];
        first = new int[columns.width()];
    }

    long direct() {
        return direct;
    }

    /** Send a batch, whose first row is {@code row} of the matrix. */
    void send(DefaultCachedBatch batch, long row) throws IOException {
        long began = System.nanoTime();
        RankBlock.Part[] parts = block.parts(row, batch.numRows());
        for (int k = 0; k < values.length; k++) {
            find(batch, k);
            for (RankBlock.Part part : parts) {
                part.put(k, values[k], first[k]);
            }
        }
        block.took(System.nanoTime() - began);
        if (block.far()) {
            stream(row, batch.numRows());
        }
    }

    /** Find a column's values: as they are stored, or decoded. */
    private void find(DefaultCachedBatch batch, int k) throws IOException {
        byte[] stored = batch.buffers()[columns.ordinal(k)];
        if (Platform.getInt(stored, Block.BASE) > 0) {
            throw columns.nulls(k);
        }
        int encoding = Platform.getInt(stored, Block.BASE + 4);
        if (columns.same(k) && encoding == PassThrough$.MODULE$.typeId()) {
            values[k] = stored;
            first[k] = HEADER_BYTES;
            direct++;
        } else {
            values[k] = decode(stored, k, batch.numRows());
            first[k] = 0;
        }
    }

    private byte[] decode(byte[] stored, int k, int rows) throws IOException {
        if (decoded[k] == null || decoded[k].length < rows * element.nbytes) {
            decoded[k] = new byte[rows * element.nbytes];
        }
        DataType type = type(columns.type(k));
        try (OnHeapColumnVector vector = new OnHeapColumnVector(rows, type)) {
            ColumnAccessor$.MODULE$.decompress(stored, vector, type, rows);
            columns.read(vector, k, 0, rows, decoded[k], 0);
        }
        return decoded[k];
    }

    /** Send the batch to other nodes, in parts that fit a block. */
    private void stream(long row, int rows) throws IOException {
        for (int start = 0, count; start < rows; start += count) {
            count = Math.min(block.capacity(), rows - start);
            int nbytes = count * element.nbytes;
            for (int k = 0; k < values.length; k++) {
                System.arraycopy(
                        values[k], first[k] + start * element.nbytes,
                        block.bytes, k * nbytes, nbytes);
            }
            block.stream(
                    new long[] {row + start, row + start + count, 0, values.length},
                    false, block.bytes, 0);
        }
    }

    private static DataType type(String name) {
        switch (name) {
            case "bool": return DataTypes.BooleanType;
            case "int8": return DataTypes.ByteType;
            case "int16": return DataTypes.ShortType;
            case "int32": return DataTypes.IntegerType;
            case "int64": return DataTypes.LongType;
            case "float32": return DataTypes.FloatType;
            default: return DataTypes.DoubleType;
        }
    }
}
