package alchemist.spark;

import java.io.IOException;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.unsafe.Platform;

/** Makes the readers of a {@link MatrixSource}'s partitions. Spark may read one again. */
final class MatrixReaders implements PartitionReaderFactory {
    private static final long serialVersionUID = 1;

    /** Rows {@code [start, stop)} of the matrix. */
    static final class Rows implements InputPartition {
        private static final long serialVersionUID = 1;

        final long start, stop;

        Rows(long start, long stop) {
            this.start = start;
            this.stop = stop;
        }
    }

    private final String target;
    private final int[] columns; // that Spark needs, ascending

    MatrixReaders(String target, int[] columns) {
        this.target = target;
        this.columns = columns;
    }

    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
        return new RowReader(Target.parse(target), columns, (Rows) partition);
    }

    /**
     * Rows in Spark's binary form: a word per 64 columns for nulls, then 8 bytes per element.
     *
     * <p>Elements of 8 bytes are fetched to where they belong. In columns, Spark would make the same
     * rows of them, element by element.
     */
    private static final class RowReader implements PartitionReader<InternalRow> {
        private static final int WORD = UnsafeRow.WORD_SIZE;

        private final int cols, itemsize;
        private final Fetcher fetcher;
        private final long stop;
        private long next; // to be fetched
        private final int height; // rows that fit
        private final int head, stride; // bytes of a row's nulls, and of all
        private final byte[] rows;
        private final byte[] narrow; // elements of less than a word
        private int count, at; // rows that were fetched; the current one
        private final UnsafeRow row;

        RowReader(Target target, int[] columns, Rows part) {
            cols = columns.length;
            itemsize = target.element.nbytes;
            fetcher = new Fetcher(target, columns);
            next = part.start;
            stop = part.stop;
            head = UnsafeRow.calculateBitSetWidthInBytes(cols);
            stride = Math.addExact(head, Math.multiplyExact(WORD, cols));
            int fitting = Fetcher.BATCH_BYTES / Math.max(WORD, stride);
            height = (int) Math.min(Math.max(1, fitting), stop - next);
            rows = new byte[Math.multiplyExact(height, stride)];
            narrow = itemsize == WORD ? null : new byte[height * cols * itemsize];
            row = new UnsafeRow(cols);
        }

        @Override
        public boolean next() throws IOException {
            if (++at >= count) {
                if (next >= stop) {
                    return false;
                }
                fetch();
            }
            row.pointTo(rows, Block.BASE + (long) at * stride, stride);
            return true;
        }

        private void fetch() throws IOException {
            at = 0;
            count = (int) Math.min(height, stop - next);
            if (narrow == null) {
                fetcher.rows(next, count, rows, head, stride);
            } else {
                fetcher.rows(next, count, narrow, 0, cols * itemsize);
                widen();
            }
            next += count;
        }

        private void widen() {
            long from = Block.BASE;
            for (int k = 0; k < count; k++) {
                long to = Block.BASE + (long) k * stride + head;
                for (int j = 0; j < cols; j++, to += WORD, from += itemsize) {
                    if (itemsize == 4) {
                        Platform.putInt(rows, to, Platform.getInt(narrow, from));
                    } else {
                        Platform.putByte(rows, to, Platform.getByte(narrow, from));
                    }
                }
            }
        }

        @Override
        public InternalRow get() {
            return row;
        }

        @Override
        public void close() throws IOException {
            fetcher.close();
        }
    }
}
