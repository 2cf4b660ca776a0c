package alchemist.spark;

import java.io.IOException;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

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

    MatrixReaders(String target) {
        this.target = target;
    }

    @Override
    public boolean supportColumnarReads(InputPartition partition) {
        return true;
    }

    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
        throw new UnsupportedOperationException("the source is read by columns");
    }

    @Override
    public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
        return new ColumnReader(Target.parse(target), (Rows) partition);
    }

    /** Batches with a column for each of the matrix. */
    private static final class ColumnReader implements PartitionReader<ColumnarBatch> {
        private final Target target;
        private final Fetcher fetcher;
        private final int height; // rows of a batch
        private long next;
        private final long stop;
        private final OnHeapColumnVector[] columns;
        private final ColumnarBatch batch;

        ColumnReader(Target target, Rows rows) {
            this.target = target;
            fetcher = new Fetcher(target);
            next = rows.start;
            stop = rows.stop;
            long fitting = Fetcher.BATCH_BYTES / ((long) target.cols * target.element.nbytes);
            height = (int) Math.max(1, Math.min(fitting, stop - next));
            columns = new OnHeapColumnVector[target.cols];
            for (int j = 0; j < columns.length; j++) {
                columns[j] = new OnHeapColumnVector(height, MatrixSource.type(target.element));
            }
            batch = new ColumnarBatch(columns.clone());
        }

        @Override
        public boolean next() throws IOException {
            if (next >= stop) {
                return false;
            }
            int count = (int) Math.min(height, stop - next);
            byte[] block = fetcher.fetch(new long[] {next, next + count, 0, target.cols}, false);
            next += count;
            for (int j = 0; j < columns.length; j++) {
                int at = j * count * target.element.nbytes;
                switch (target.element) {
                    case BOOL:
                        columns[j].putBytes(0, count, block, at);
                        break;
                    case INT32:
                        columns[j].putInts(0, count, block, at);
                        break;
                    case INT64:
                        columns[j].putLongs(0, count, block, at);
                        break;
                    case FLOAT32:
                        columns[j].putFloats(0, count, block, at);
                        break;
                    default:
                        columns[j].putDoubles(0, count, block, at);
                }
            }
            batch.setNumRows(count);
            return true;
        }

        @Override
        public ColumnarBatch get() {
            return batch;
        }

        @Override
        public void close() throws IOException {
            batch.close();
            fetcher.close();
        }
    }
}
