package alchemist.spark;

import java.io.IOException;
import org.apache.spark.sql.execution.columnar.ColumnAccessor$;
import org.apache.spark.sql.execution.columnar.DefaultCachedBatch;
import org.apache.spark.sql.execution.columnar.compression.PassThrough$;
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector;
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

    Stored(Columns columns, Block block) {
        this.columns = columns;
        element = block.target.element;
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
        block.took(began);
        if (block.far()) {
            stream(row, batch.numRows());
        }
    }

    /** Find a column's values: as they are stored, or decoded. */
    private void find(DefaultCachedBatch batch, int k) throws IOException {
        Columns.Column column = columns.all.get(k);
        byte[] stored = batch.buffers()[column.ordinal];
        if (Platform.getInt(stored, Block.BASE) > 0) {
            throw column.nulls();
        }
        int encoding = Platform.getInt(stored, Block.BASE + 4);
        if (column.same && encoding == PassThrough$.MODULE$.typeId()) {
            values[k] = stored;
            first[k] = HEADER_BYTES;
            direct++;
            return;
        }
        int rows = batch.numRows();
        if (decoded[k] == null || decoded[k].length < rows * element.nbytes) {
            decoded[k] = new byte[rows * element.nbytes];
        }
        try (OnHeapColumnVector vector = new OnHeapColumnVector(rows, column.from.type)) {
            ColumnAccessor$.MODULE$.decompress(stored, vector, column.from.type, rows);
            column.read(vector, 0, rows, decoded[k], 0);
        }
        values[k] = decoded[k];
        first[k] = 0;
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
}
