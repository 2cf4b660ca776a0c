package alchemist.spark;

import java.io.Closeable;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeArrayData;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.Platform;

/** Makes the readers of a {@link MatrixSource}'s partitions. Spark may read one again. */
final class MatrixReaders implements PartitionReaderFactory {
    private static final long serialVersionUID = 1;
    private static final int BATCH_BYTES = 4 << 20;
    private static final int STAGING_BYTES = 512 << 10;
    private static final byte DENSE = 1;

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
    private final boolean vectors;

    MatrixReaders(String target, boolean vectors) {
        this.target = target;
        this.vectors = vectors;
    }

    @Override
    public boolean supportColumnarReads(InputPartition partition) {
        return !vectors;
    }

    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
        return new VectorReader(Target.parse(target), (Rows) partition);
    }

    @Override
    public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
        return new ColumnReader(Target.parse(target), (Rows) partition);
    }

    /** Fetches a partition in batches of rows. */
    private abstract static class Fetcher implements Closeable {
        final Target target;
        final int itemsize;
        final int height; // rows of a batch
        final byte[] block;
        long row; // the batch's first
        int count; // its rows
        private long next;
        private final long stop;
        private final List<Connection> connections = new ArrayList<>();
        private final ByteBuffer staging = ByteBuffer.allocate(STAGING_BYTES);

        Fetcher(Target target, Rows rows) {
            this.target = target;
            next = rows.start;
            stop = rows.stop;
            itemsize = target.element.nbytes;
            long fitting = Math.max(1, BATCH_BYTES / ((long) target.cols * itemsize));
            height = (int) Math.max(1, Math.min(fitting, stop - next));
            block = new byte[Math.multiplyExact(height, target.cols * itemsize)];
        }

        /** Fetch the next batch; false at the end. */
        boolean fetch(boolean byRow) throws IOException {
            if (next >= stop) {
                return false;
            }
            row = next;
            count = (int) Math.min(height, stop - next);
            next += count;
            while (connections.size() < target.nodes.size()) {
                Target.Node node = target.nodes.get(connections.size());
                connections.add(Connection.open(node.host, node.port, target.token));
            }
            long stride = (long) (byRow ? target.cols : count) * itemsize;
            for (int k = 0; k < connections.size(); k++) {
                Target.Node node = target.nodes.get(k);
                Connection connection = connections.get(k);
                Share share =
                        new Share(node, row, row + count, target.cols, itemsize, byRow);
                if (share.nbytes() == 0) {
                    continue;
                }
                String order = byRow ? "C" : "F";
                connection.send(Connection.GET, target.request(node, row, row + count, order));
                connection.expect(Connection.DATA);
                if (connection.payloadBytes() != share.nbytes()) {
                    throw new IOException("the node sent " + connection.payloadBytes()
                            + " bytes instead of " + share.nbytes());
                }
                share.receive(connection, block, stride, staging);
            }
            return true;
        }

        @Override
        public void close() throws IOException {
            for (Connection connection : connections) {
                connection.close();
            }
        }
    }

    /** Batches with a column for each of the matrix. */
    private static final class ColumnReader extends Fetcher
            implements PartitionReader<ColumnarBatch> {
        private final OnHeapColumnVector[] columns;
        private final ColumnarBatch batch;

        ColumnReader(Target target, Rows rows) {
            super(target, rows);
            columns = new OnHeapColumnVector[target.cols];
            for (int j = 0; j < columns.length; j++) {
                columns[j] = new OnHeapColumnVector(height, MatrixSource.type(target.element));
            }
            batch = new ColumnarBatch(columns.clone());
        }

        @Override
        public boolean next() throws IOException {
            if (!fetch(false)) {
                return false;
            }
            for (int j = 0; j < columns.length; j++) {
                int at = j * count * itemsize;
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
            super.close();
        }
    }

    /** The number of each row, and the row as a dense vector. */
    private static final class VectorReader extends Fetcher
            implements PartitionReader<InternalRow> {
        private int place = -1; // of the row in its batch

        VectorReader(Target target, Rows rows) {
            super(target, rows);
        }

        @Override
        public boolean next() throws IOException {
            place++;
            if (place < count) {
                return true;
            }
            place = 0;
            return fetch(true);
        }

        @Override
        public InternalRow get() {
            double[] values = new double[target.cols];
            long at = Block.BASE + (long) place * values.length * itemsize;
            for (int j = 0; j < values.length; j++, at += itemsize) {
                values[j] = value(at);
            }
            Object[] vector = {DENSE, null, null, UnsafeArrayData.fromPrimitiveArray(values)};
            return new GenericInternalRow(
                    new Object[] {row + place, new GenericInternalRow(vector)});
        }

        private double value(long at) {
            switch (target.element) {
                case BOOL: return Platform.getByte(block, at);
                case INT32: return Platform.getInt(block, at);
                case INT64: return Platform.getLong(block, at);
                case FLOAT32: return Platform.getFloat(block, at);
                default: return Platform.getDouble(block, at);
            }
        }
    }
}
