package alchemist.spark;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.execution.columnar.ColumnAccessor$;
import org.apache.spark.sql.execution.columnar.DefaultCachedBatch;
import org.apache.spark.sql.execution.columnar.compression.PassThrough$;
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;

/**
 * Batches of Spark's cache, sent from where they are stored.
 *
 * <p>For each column the cache has the number of its nulls and their places, the number of an
 * encoding, and the encoded values, in the byte order of the machine. Values that are neither encoded
 * nor to be converted are sent as they are; Spark decodes others.
 *
 * <p>Batches of few rows are written together, some columns of all of them at a time: so much of the
 * ranks' memory stays in the processor's caches, where each batch writes little of each column.
 */
final class Stored {
    private static final int HEADER_BYTES = 8; // without nulls
    private static final int TOGETHER_BYTES = 16 << 20; // of batches
    private static final int TOGETHER = 8; // columns

    /** A batch, and where its rows are on this node. */
    private static final class Waiting {
        final DefaultCachedBatch batch;
        final long row;
        final List<RankBlock.Part> parts;

        Waiting(DefaultCachedBatch batch, long row, List<RankBlock.Part> parts) {
            this.batch = batch;
            this.row = row;
            this.parts = parts;
        }
    }

    private final Columns columns;
    private final Element element;
    private final Block block;
    private final byte[][] decoded; // reused
    private final byte[][] values; // of a batch
    private final int[] first; // the place of each column's first element
    private final List<Waiting> waiting = new ArrayList<>();
    private long waitingBytes;
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

    /** Send a batch, whose first row is {@code row} of the matrix; {@link #flush} follows. */
    void send(DefaultCachedBatch batch, long row) throws IOException {
        waiting.add(new Waiting(batch, row, block.parts(row, batch.numRows())));
        waitingBytes += (long) batch.numRows() * values.length * element.nbytes;
        if (block.far() || waitingBytes >= TOGETHER_BYTES) {
            flush();
        }
    }

    void flush() throws IOException {
        long began = System.nanoTime();
        for (int left = 0; left < values.length; left += TOGETHER) {
            for (Waiting its : waiting) {
                for (int k = left; k < Math.min(left + TOGETHER, values.length); k++) {
                    find(its.batch, k);
                    for (RankBlock.Part part : its.parts) {
                        part.put(k, values[k], first[k]);
                    }
                }
            }
        }
        block.took(System.nanoTime() - began);
        if (block.far()) {
            for (Waiting its : waiting) { // one: its values were found last
                stream(its.row, its.batch.numRows());
            }
        }
        waiting.clear();
        waitingBytes = 0;
    }

    /** Find a column's values: as they are stored, or decoded. */
    private void find(DefaultCachedBatch batch, int k) throws IOException {
        byte[] stored = batch.buffers()[columns.ordinal(k)];
        ByteBuffer header = ByteBuffer.wrap(stored).order(ByteOrder.nativeOrder());
        if (header.getInt() > 0) {
            throw columns.nulls(k);
        }
        if (columns.same(k) && header.getInt() == PassThrough$.MODULE$.typeId()) {
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
