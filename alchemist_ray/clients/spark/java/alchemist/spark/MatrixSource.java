package alchemist.spark;

import java.io.IOException;
import java.util.Arrays;
import java.util.Collections;
import java.util.Objects;
import java.util.OptionalLong;
import java.util.Set;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsPushDownLimit;
import org.apache.spark.sql.connector.read.SupportsPushDownOffset;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.unsafe.Platform;
import scala.Option;

/** A matrix as a DataFrame; the session calls it through py4j. */
public final class MatrixSource {
    private MatrixSource() {}

    /**
     * The columns have the names, a list in JSON; if it is empty, c0, c1, ...
     *
     * <p>Spark finds a source by its name in all its jars; a table needs no search.
     */
    public static Dataset<Row> frame(
            SparkSession spark, String spec, int partitions, String names) throws IOException {
        Table table = new Matrix(spec, partitions, spark.sparkContext().defaultParallelism());
        Dataset<Row> frame = Dataset.ofRows(
                spark, DataSourceV2Relation.create(table, Option.empty(), Option.empty()));
        String[] all = Target.JSON.readValue(names, String[].class);
        return all.length > 0 ? frame.toDF(all) : frame;
    }

    private static final class Matrix implements SupportsRead {
        private final String spec;
        private final Target target;
        private final int count, least;
        private final StructType schema;

        /** A scan of some of its rows has fewer partitions, but at least {@code least}. */
        Matrix(String spec, int partitions, int least) {
            this.spec = spec;
            target = Target.parse(spec);
            count = partitions;
            this.least = Math.min(least, partitions);
            StructField[] fields = new StructField[target.cols];
            for (int j = 0; j < fields.length; j++) {
                fields[j] = DataTypes.createStructField("c" + j, target.element.type, false);
            }
            schema = new StructType(fields);
        }

        @Override
        public String name() {
            return "matrix of an Alchemist gang";
        }

        @Override
        public StructType schema() {
            return schema;
        }

        @Override
        public Set<TableCapability> capabilities() {
            return Collections.singleton(TableCapability.BATCH_READ);
        }

        @Override
        public ScanBuilder newScanBuilder(CaseInsensitiveStringMap more) {
            return new Part(this);
        }
    }

    /** The rows and columns that a query needs. */
    private static final class Part
            implements ScanBuilder, SupportsPushDownRequiredColumns, SupportsPushDownLimit,
            SupportsPushDownOffset, Scan, SupportsReportStatistics, Batch {
        private final Matrix matrix;
        private StructType schema;
        private long start, stop; // rows

        Part(Matrix matrix) {
            this.matrix = matrix;
            schema = matrix.schema;
            stop = matrix.target.rows;
        }

        @Override
        public void pruneColumns(StructType needed) {
            schema = needed;
        }

        @Override
        public boolean pushLimit(int limit) {
            stop = Math.min(stop, start + limit);
            return true;
        }

        @Override
        public boolean isPartiallyPushed() {
            return false; // Spark does not limit the rows again
        }

        @Override
        public boolean pushOffset(int offset) {
            start = Math.min(stop, start + offset);
            return true;
        }

        @Override
        public Scan build() {
            return this;
        }

        @Override
        public String description() {
            return matrix.name() + ", rows " + start + " to " + stop;
        }

        @Override
        public StructType readSchema() {
            return schema;
        }

        /** Of rows in Spark's form: it sends a small side of a join to all executors. */
        @Override
        public Statistics estimateStatistics() {
            long rows = stop - start;
            return new Statistics() {
                @Override
                public OptionalLong sizeInBytes() {
                    return OptionalLong.of(rows * UnsafeRow.WORD_SIZE * (1 + schema.size()));
                }

                @Override
                public OptionalLong numRows() {
                    return OptionalLong.of(rows);
                }
            };
        }

        @Override
        public Batch toBatch() {
            return this;
        }

        /** The same of any columns: rows are counted by partitions without columns, then sent. */
        @Override
        public InputPartition[] planInputPartitions() {
            long rows = stop - start;
            double share = (double) rows / Math.max(1, matrix.target.rows);
            long wanted = Math.max(matrix.least, (long) Math.ceil(matrix.count * share));
            int count = (int) Math.max(1, Math.min(rows, wanted));
            InputPartition[] parts = new InputPartition[count];
            for (int k = 0; k < count; k++) {
                parts[k] = new Rows(
                        start + rows * k / count, start + rows * (k + 1) / count);
            }
            return parts;
        }

        @Override
        public PartitionReaderFactory createReaderFactory() {
            return new Readers(matrix.spec, columns());
        }

        private int[] columns() {
            return Arrays.stream(schema.fieldNames()).mapToInt(matrix.schema::fieldIndex).toArray();
        }

        /** Spark reads equal parts once for a query. */
        @Override
        public boolean equals(Object other) {
            return other instanceof Part && ((Part) other).matrix == matrix
                    && ((Part) other).schema.equals(schema)
                    && ((Part) other).start == start && ((Part) other).stop == stop;
        }

        @Override
        public int hashCode() {
            return Objects.hash(matrix, schema, start, stop);
        }
    }

    /** Rows {@code [start, stop)} of the matrix. */
    private static final class Rows implements InputPartition {
        private static final long serialVersionUID = 1;

        final long start, stop;

        Rows(long start, long stop) {
            this.start = start;
            this.stop = stop;
        }
    }

    /** Makes the readers of the partitions. Spark may read one again. */
    private static final class Readers implements PartitionReaderFactory {
        private static final long serialVersionUID = 1;

        private final String target;
        private final int[] columns; // that Spark needs, ascending

        Readers(String target, int[] columns) {
            this.target = target;
            this.columns = columns;
        }

        @Override
        public PartitionReader<InternalRow> createReader(InputPartition partition) {
            return new RowReader(Target.parse(target), columns, (Rows) partition);
        }
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
